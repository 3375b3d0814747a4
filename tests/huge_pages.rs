//! The memory of a cache: pages come with the tokens, and they are huge ones where the system offers them.

#![cfg(target_os = "linux")]

mod common;

use fused_attention::{Capacity, KvCache, KvCacheShape, TensorView};

/// 256 MiB of keys: 2^19 tokens of 128 features.
const SHAPE: KvCacheShape = KvCacheShape { num_layers: 1, batch: 1, num_kv_heads: 1, head_dim: 128, value_dim: 1 };
const TOKENS: usize = 1 << 19;

/// A field of the mapping in which this address lies, in KiB, as `/proc/self/smaps` gives it.
fn mapping_kib(address: usize, field: &str) -> Option<usize> {
    let smaps = std::fs::read_to_string("/proc/self/smaps").ok()?;
    let is_mapping = |line: &str| {
        let (start, end) = line.split_whitespace().next()?.split_once('-')?;
        let bound = |text| usize::from_str_radix(text, 16).ok();
        Some(bound(start)? <= address && address < bound(end)?)
    };
    let mut fields = smaps.lines().skip_while(|line| is_mapping(line) != Some(true)).skip(1);
    let line = fields.by_ref().take_while(|line| is_mapping(line).is_none()).find(|line| line.starts_with(field))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// Why huge pages cannot be seen here, if so.
fn hindrance() -> Option<&'static str> {
    if std::env::var_os("FUSED_ATTENTION_TEST_RUNNER").is_some() {
        return Some("an emulator stands between this process and the kernel");
    }
    let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    if !enabled.contains("[madvise]") && !enabled.contains("[always]") {
        return Some("this system does not offer them");
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    if status.lines().any(|line| line.starts_with("THP_enabled:") && line.ends_with('0')) {
        return Some("they are disabled for this process");
    }
    None
}

#[test]
fn pages_come_with_the_tokens() {
    let mut cache = KvCache::<f32>::new(&SHAPE, Capacity::Fixed(TOKENS)).unwrap();
    let one = [1.0f32];
    let mut append = |tokens| {
        let [k, v] = [128, 1].map(|dim| TensorView::with_strides(&one, [1, 1, tokens, dim], [0; 4]).unwrap());
        cache.append(0, &k, &v).unwrap();
        cache.k(0).unwrap().data().as_ptr().addr()
    };
    let address = append(0);
    assert!(address.is_multiple_of(2 << 20), "buffers of this size start on a huge page");
    let Some(before) = mapping_kib(address, "Rss:") else {
        println!("skipped: /proc/self/smaps does not tell");
        return;
    };
    assert!(before <= 4 << 10, "an empty cache takes {before} KiB");

    append(TOKENS / 16);
    let after = mapping_kib(address, "Rss:").unwrap();
    assert!((16 << 10..40 << 10).contains(&after), "16 MiB of keys take {after} KiB");
    match (mapping_kib(address, "AnonHugePages:"), hindrance()) {
        (Some(huge), None) => assert!(huge > 0, "no huge page among {after} KiB"),
        (_, Some(why)) => println!("skipped: huge pages cannot be seen: {why}"),
        (None, None) => println!("skipped: huge pages cannot be seen: smaps does not tell"),
    }
}
