//! A cache refuses what it cannot do, with the numbers, and stays as it was.

use crate::common::Layout;
use crate::common::cache::{Stored, copied, new_tokens};
use fused_attention::{AttentionError, Capacity, KvCache, KvCacheShape, TensorView, f16};

/// Two layers, three sequences, two heads, five features of keys and three of values: all sizes that may be confused differ.
const SHAPE: KvCacheShape = KvCacheShape { num_layers: 2, batch: 3, num_kv_heads: 2, head_dim: 5, value_dim: 3 };

/// All that can be seen of a cache.
fn snapshot<T: Stored>(cache: &KvCache<T>) -> Vec<(usize, Vec<usize>, [Vec<u32>; 2])> {
    let layers = 0..cache.shape().num_layers;
    let seen = layers.map(|layer| {
        let views = [cache.k(layer).unwrap(), cache.v(layer).unwrap()];
        let bits = views.map(|view| copied(&view).into_iter().map(T::bits).collect());
        (cache.capacity(layer).unwrap(), cache.lens(layer).unwrap().to_vec(), bits)
    });
    seen.collect()
}

/// The error of `operation` on a cache of [`SHAPE`] with 4, 5 and 4 tokens in layer 0 and 3, 3 and 3 in layer 1; asserts that it
/// changes nothing and that the message holds these words.
fn refused(
    capacity: Capacity,
    words: &[&str],
    operation: impl Fn(&mut KvCache<f16>) -> Result<(), AttentionError>,
) -> AttentionError {
    let mut cache = KvCache::<f16>::new(&SHAPE, capacity).unwrap();
    for (layer, tokens) in [(0, 4), (1, 3)] {
        let [k, v] = new_tokens(&SHAPE, 3, tokens, [Layout::Bhsd; 2], 1);
        cache.append(layer, &k.view(), &v.view()).unwrap();
    }
    let [k, v] = new_tokens(&SHAPE, 1, 1, [Layout::Bhsd; 2], 2);
    cache.append_to(0, 1, &k.view(), &v.view()).unwrap();
    let before = snapshot(&cache);
    let error = operation(&mut cache).unwrap_err();
    assert_eq!(snapshot(&cache), before, "{error}");
    let message = error.to_string();
    let is_named = |word: &&str| message.split(|c: char| !c.is_alphanumeric()).any(|found| found == *word);
    assert!(words.iter().all(is_named), "{message:?} does not name all of {words:?}");
    error
}

/// Appends tensors of these shapes, all ones, to a layer, or to one sequence of it.
fn append_shapes<T: Stored>(
    cache: &mut KvCache<T>,
    layer: usize,
    sequence: Option<usize>,
    [k, v]: [[usize; 4]; 2],
) -> Result<(), AttentionError> {
    let [k, v] = [k, v].map(|shape| TensorView::with_strides(&[1.0f32], shape, [0; 4]).unwrap());
    match sequence {
        None => cache.append(layer, &k, &v),
        Some(sequence) => cache.append_to(layer, sequence, &k, &v),
    }
}

#[test]
fn appends_that_do_not_fit_are_refused() {
    use AttentionError::{AppendShapeMismatch, CacheFull, KvLenMismatch};
    let fixed = Capacity::Fixed(6);
    let append = |shapes| move |cache: &mut KvCache<f16>| append_shapes(cache, 0, None, shapes);
    for (k, v, tensor, expected) in [
        ([2, 2, 1, 5], [3, 2, 1, 3], "k", [3, 2, 1, 5]),
        ([3, 4, 1, 5], [3, 2, 1, 3], "k", [3, 2, 1, 5]),
        ([3, 2, 1, 7], [3, 2, 1, 3], "k", [3, 2, 1, 5]),
        ([3, 2, 1, 5], [1, 2, 1, 3], "v", [3, 2, 1, 3]),
        ([3, 2, 1, 5], [3, 1, 1, 3], "v", [3, 2, 1, 3]),
        ([3, 2, 1, 5], [3, 2, 1, 4], "v", [3, 2, 1, 3]),
    ] {
        let found = if tensor == "k" { k } else { v };
        let numbers = [expected, found].concat().iter().map(|n| n.to_string()).collect::<Vec<_>>();
        let words: Vec<&str> = numbers.iter().map(|n| &n[..]).chain([tensor]).collect();
        assert_eq!(refused(fixed, &words, append([k, v])), AppendShapeMismatch { tensor, expected, found });
    }
    let error = refused(fixed, &["3", "5"], |cache| append_shapes(cache, 0, Some(2), [[3, 2, 1, 5], [1, 2, 1, 3]]));
    assert_eq!(error, AppendShapeMismatch { tensor: "k", expected: [1, 2, 1, 5], found: [3, 2, 1, 5] });
    let error = refused(fixed, &["1", "2"], append([[3, 2, 1, 5], [3, 2, 2, 3]]));
    assert_eq!(error, KvLenMismatch { k: 1, v: 2 });

    let error = refused(fixed, &["6", "5", "2"], append([[3, 2, 2, 5], [3, 2, 2, 3]]));
    assert_eq!(error, CacheFull { layer: 0, sequence: 1, len: 5, tokens: 2, capacity: 6 }, "the fullest is named");
    let error =
        refused(fixed, &["6", "3", "4"], |cache| append_shapes(cache, 1, Some(2), [[1, 2, 4, 5], [1, 2, 4, 3]]));
    assert_eq!(error, CacheFull { layer: 1, sequence: 2, len: 3, tokens: 4, capacity: 6 });
}

#[test]
fn layers_and_sequences_that_do_not_exist_are_refused() {
    use AttentionError::{LayerOutOfRange, SequenceOutOfRange, TruncateBeyondLen};
    let one = [[3, 2, 1, 5], [3, 2, 1, 3]];
    let one_of_one = [[1, 2, 1, 5], [1, 2, 1, 3]];
    for layer in [2, usize::MAX] {
        let words = [&layer.to_string()[..], "2"];
        let no_layer = |operation: &dyn Fn(&mut KvCache<f16>) -> Result<(), AttentionError>| {
            assert_eq!(refused(Capacity::Fixed(6), &words, operation), LayerOutOfRange { layer, num_layers: 2 });
        };
        no_layer(&|cache| append_shapes(cache, layer, None, one));
        no_layer(&|cache| append_shapes(cache, layer, Some(0), one_of_one));
        no_layer(&|cache| cache.capacity(layer).map(drop));
        no_layer(&|cache| cache.len(layer, 0).map(drop));
        no_layer(&|cache| cache.lens(layer).map(drop));
        no_layer(&|cache| cache.k(layer).map(drop));
        no_layer(&|cache| cache.v(layer).map(drop));
        no_layer(&|cache| cache.k_of(layer, 0).map(drop));
        no_layer(&|cache| cache.v_of(layer, 0).map(drop));
    }
    for sequence in [3, usize::MAX] {
        let words = [&sequence.to_string()[..], "3"];
        let no_sequence = |operation: &dyn Fn(&mut KvCache<f16>) -> Result<(), AttentionError>| {
            assert_eq!(refused(Capacity::Fixed(6), &words, operation), SequenceOutOfRange { sequence, batch: 3 });
        };
        no_sequence(&|cache| append_shapes(cache, 0, Some(sequence), one_of_one));
        no_sequence(&|cache| cache.len(0, sequence).map(drop));
        no_sequence(&|cache| cache.k_of(0, sequence).map(drop));
        no_sequence(&|cache| cache.v_of(0, sequence).map(drop));
        no_sequence(&|cache| cache.truncate_sequence(sequence, 0));
    }
    let error = refused(Capacity::Fixed(6), &["4", "3", "1"], |cache| cache.truncate(4));
    assert_eq!(error, TruncateBeyondLen { layer: 1, sequence: 0, len: 3, new_len: 4 });
    let error = refused(Capacity::Fixed(6), &["5", "4"], |cache| cache.truncate_sequence(2, 5));
    assert_eq!(error, TruncateBeyondLen { layer: 0, sequence: 2, len: 4, new_len: 5 });
}

#[cfg(target_pointer_width = "64")]
#[test]
fn what_memory_cannot_hold_is_refused() {
    use AttentionError::{AllocationFailed, CacheFull, SizeOverflow, ZeroHeadDim};
    let new = |shape, tokens| KvCache::<f32>::new(&shape, Capacity::Fixed(tokens)).map(drop).unwrap_err();
    assert_eq!(new(KvCacheShape { head_dim: 0, ..SHAPE }, 9), ZeroHeadDim { shape: [3, 2, 9, 0] });
    assert_eq!(
        new(SHAPE, 1 << 50),
        AllocationFailed { bytes: (3 * 2 * 5 * 4) << 50 },
        "the streams are multiples of 64"
    );
    for (batch, num_layers) in [(usize::MAX, 2), (3, usize::MAX), (0, usize::MAX)] {
        let error = new(KvCacheShape { batch, num_layers, num_kv_heads: 0, ..SHAPE }, 9);
        assert_eq!(error, AllocationFailed { bytes: usize::MAX });
    }
    let max = usize::MAX;
    for shape in [[3, 2, max, 5], [3, 2, max / 5, 5], [3, max, 9, 5], [1 << 58, 1, 1, 16], [1, 1, 1, max]] {
        let [batch, num_kv_heads, tokens, head_dim] = shape;
        // A single layer of few sequences, so that lengths can be had.
        let error = new(KvCacheShape { num_layers: 1, batch, num_kv_heads, head_dim, value_dim: 1 }, tokens);
        let is_expected = match error {
            SizeOverflow { shape: found, .. } => found == shape,
            AllocationFailed { .. } => batch > 3, // the lengths alone
            _ => false,
        };
        assert!(is_expected, "{error}");
    }

    // Growth: the layer keeps its memory and its tokens.
    let growing = Capacity::Growing(6);
    let append = |tokens| {
        move |cache: &mut KvCache<f16>| append_shapes(cache, 1, Some(0), [[1, 2, tokens, 5], [1, 2, tokens, 3]])
    };
    let error = refused(growing, &[], append(1 << 50));
    assert!(matches!(error, AllocationFailed { bytes } if bytes >= (3 * 2 * 5 * 2) << 50), "{error}");
    let error = refused(growing, &[&((1usize << 60) + 3).to_string()], append(1 << 60));
    assert!(matches!(error, SizeOverflow { shape: [3, 2, _, 5], .. }), "{error}");
    // Keys that fit, values that do not.
    let shape = KvCacheShape { num_layers: 1, batch: 1, num_kv_heads: 1, head_dim: 1, value_dim: 1 << 54 };
    let mut cache = KvCache::<f32>::new(&shape, Capacity::Growing(0)).unwrap();
    let error = append_shapes(&mut cache, 0, None, [[1, 1, 1, 1], [1, 1, 1, 1 << 54]]).unwrap_err();
    assert_eq!((error, cache.capacity(0), cache.len(0, 0)), (AllocationFailed { bytes: 1 << 56 }, Ok(0), Ok(0)));
    // Without heads tokens take no memory, but their number is limited.
    let shape = KvCacheShape { num_kv_heads: 0, head_dim: 1, value_dim: 0, ..shape };
    let mut cache = KvCache::<f32>::new(&shape, Capacity::Growing(0)).unwrap();
    let half = [[1, 0, 1 << 63, 1], [1, 0, 1 << 63, 0]];
    append_shapes(&mut cache, 0, None, half).unwrap();
    assert_eq!(cache.k(0).unwrap().shape(), [1, 0, 1 << 63, 1]);
    let error = append_shapes(&mut cache, 0, None, half).unwrap_err();
    assert_eq!(error, CacheFull { layer: 0, sequence: 0, len: 1 << 63, tokens: 1 << 63, capacity: 1 << 63 });
    // Nor do features, as long as those of a head can be counted.
    let shape = KvCacheShape { value_dim: max / 8, ..shape };
    let mut cache = KvCache::<f32>::new(&shape, Capacity::Growing(0)).unwrap();
    append_shapes(&mut cache, 0, None, [[1, 0, 4, 1], [1, 0, 4, max / 8]]).unwrap();
    let error = append_shapes(&mut cache, 0, None, [[1, 0, 5, 1], [1, 0, 5, max / 8]]).unwrap_err();
    assert!(matches!(error, SizeOverflow { shape: [1, 0, 9, _], .. }), "{error}");
    assert_eq!(cache.lens(0).unwrap(), [4]);
}
