//! Where a real layer looked: the attention weights of some heads as a heat map, SVG and PNG, labelled with the tokens; and in the terminal the
//! tokens that one of them looks at most.
//!
//! `cargo run --release --example heatmap -- --heads 8,9,11 --tokens 62..86 --look 73`
//!
//! Weights show where a layer looked, they are not an explanation of what it does.

#[path = "../common/font.rs"]
mod font;
#[path = "../common/minilm.rs"]
mod minilm;

mod draw;

use std::error::Error;
use std::fs;
use std::ops::Range;
use std::path::PathBuf;

use clap::Parser;
use fused_attention::AttentionConfig;

use crate::draw::HeatMap;
use crate::minilm::{MiniLm, NUM_HEADS};

/// Draws where the heads of a layer of all-MiniLM-L6-v2 look in the first 320 tokens of the Apache License
#[derive(Parser)]
struct Args {
    /// Heads, from 0 to 11. Of the defaults, 8 looks at the words behind, 9 at the same word elsewhere, 11 at the word before
    #[arg(long, value_delimiter = ',', default_value = "8,9,11")]
    heads: Vec<usize>,
    /// Tokens to draw, as rows and as columns
    #[arg(long, value_parser = parse_range, default_value = "62..86")]
    tokens: Range<usize>,
    /// The token whose looks are printed
    #[arg(long, default_value_t = 73)]
    look: usize,
    /// Let tokens see only those before them
    #[arg(long)]
    causal: bool,
    /// The drawing as SVG
    #[arg(long, default_value = "target/heatmap.svg")]
    svg: PathBuf,
    /// The drawing as PNG
    #[arg(long, default_value = "target/heatmap.png")]
    png: PathBuf,
}

fn parse_range(text: &str) -> Result<Range<usize>, String> {
    let (start, end) = text.split_once("..").ok_or("expected START..END")?;
    let number = |text: &str| text.parse::<usize>().map_err(|error| format!("{text:?}: {error}"));
    let range = number(start)?..number(end)?;
    if range.is_empty() { Err(format!("{text} has no tokens")) } else { Ok(range) }
}

/// The tokens that one looks at most, with bars.
fn print_looks(model: &MiniLm, config: &AttentionConfig, args: &Args) -> Result<(), Box<dyn Error>> {
    let weights = model.weights(config, &args.heads, &[args.look])?;
    for (head, weights) in args.heads.iter().zip(weights.chunks(model.tokens.len())) {
        println!("\nhead {head}: {:?} (token {}) looks at", model.tokens[args.look], args.look);
        let mut keys: Vec<usize> = (0..weights.len()).collect();
        keys.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
        for key in keys.into_iter().take(6).filter(|&key| weights[key] > 0.0) {
            let bar = "█".repeat((40.0 * weights[key]).round() as usize);
            println!("  {:>14} {key:<4} {:.2} {bar}", model.tokens[key], weights[key]);
        }
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let model = MiniLm::load()?;
    let config = if args.causal { AttentionConfig::causal() } else { AttentionConfig::full() };
    let mask = if args.causal { "causal" } else { "full" };
    println!("{} tokens, {NUM_HEADS} heads, {mask} attention", model.tokens.len());
    print_looks(&model, &config, &args)?;

    // Of the chosen rows alone; what they look at outside the drawing goes into a column of its own.
    let rows: Vec<usize> = args.tokens.clone().collect();
    let weights = model.weights(&config, &args.heads, &rows)?;
    let maps: Vec<HeatMap> = args
        .heads
        .iter()
        .zip(weights.chunks(rows.len() * model.tokens.len()))
        .map(|(head, weights)| HeatMap {
            title: format!("head {head}, {mask}"),
            labels: model.tokens[args.tokens.clone()].to_vec(),
            rows: weights.chunks(model.tokens.len()).map(|row| row[args.tokens.clone()].to_vec()).collect(),
        })
        .collect();
    for path in [&args.svg, &args.png] {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
    }
    font::register();
    draw::svg(&maps, &args.svg)?;
    draw::png(&maps, &args.png)?;
    println!("\ndrawn: {} and {}", args.svg.display(), args.png.display());
    Ok(())
}
