//! Where a real layer looked, to click through: one HTML page that holds the text and the attention weights of all chosen heads, and needs
//! nothing else, no network and no server.
//!
//! `cargo run --release --example panel`, then open `target/panel.html`
//!
//! Weights show where a layer looked, they are not an explanation of what it does.

#[path = "../common/minilm.rs"]
mod minilm;

use std::error::Error;
use std::fs;
use std::path::PathBuf;

use clap::Parser;
use fused_attention::AttentionConfig;
use serde_json::json;

use crate::minilm::{MiniLm, NUM_HEADS};

const PAGE: &str = include_str!("page.html");

/// Writes a page on which a click on a word shows where a layer of all-MiniLM-L6-v2 looks from it
#[derive(Parser)]
struct Args {
    /// Heads to choose from. Default: all 12
    #[arg(long, value_delimiter = ',')]
    heads: Vec<usize>,
    /// The page
    #[arg(long, default_value = "target/panel.html")]
    html: PathBuf,
}

/// Weights as 65535ths, two bytes each, in base64.
fn encode(weights: &[f32]) -> String {
    let mut bytes: Vec<u8> =
        weights.iter().flat_map(|weight| ((weight * 65535.0).round() as u16).to_le_bytes()).collect();
    bytes.resize(bytes.len().next_multiple_of(3), 0); // whole groups: three bytes are four digits
    let digit = |bits: u32| match bits & 63 {
        bits @ 0..26 => b'A' + bits as u8,
        bits @ 26..52 => b'a' + bits as u8 - 26,
        bits @ 52..62 => b'0' + bits as u8 - 52,
        62 => b'+',
        _ => b'/',
    };
    let (groups, _) = bytes.as_chunks::<3>();
    let digits = groups.iter().flat_map(|&[a, b, c]| {
        let bits = u32::from_be_bytes([0, a, b, c]);
        [bits >> 18, bits >> 12, bits >> 6, bits].map(|bits| char::from(digit(bits)))
    });
    digits.collect()
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let model = MiniLm::load()?;
    let heads = if args.heads.is_empty() { (0..NUM_HEADS).collect() } else { args.heads };
    let rows: Vec<usize> = (0..model.tokens.len()).collect();
    let [full, causal] = [AttentionConfig::full(), AttentionConfig::causal()]
        .map(|config| model.weights(&config, &heads, &rows).map(|weights| encode(&weights)));
    let data = json!({ "tokens": model.tokens, "heads": heads, "full": full?, "causal": causal? });
    // Inside a script element nothing may look like its end.
    let page = PAGE.replace("DATA", &data.to_string().replace('<', "\\u003c"));
    if let Some(folder) = args.html.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(&args.html, page)?;
    println!("written: {}, {} tokens, {} heads", args.html.display(), rows.len(), heads.len());
    Ok(())
}
