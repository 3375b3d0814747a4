//! Heat maps side by side, in any format that plotters has.

use std::error::Error;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Weights of the tokens of the rows for the tokens of the columns.
pub struct HeatMap {
    pub title: String,
    /// Of rows and columns.
    pub labels: Vec<String>,
    pub rows: Vec<Vec<f32>>,
}

/// In pixels.
const CELL: i32 = 24;
/// Left of the rows and above the columns, for the tokens.
const LABEL: i32 = 104;
const TITLE: i32 = 34;
const MARGIN: i32 = 16;
/// Between the columns and the one for everything else.
const GAP: i32 = 6;

pub fn svg(maps: &[HeatMap], path: &Path) -> Result<(), Box<dyn Error>> {
    draw(&SVGBackend::new(path, size(maps)).into_drawing_area(), maps)
}

pub fn png(maps: &[HeatMap], path: &Path) -> Result<(), Box<dyn Error>> {
    draw(&BitMapBackend::new(path, size(maps)).into_drawing_area(), maps)
}

/// Of one map, with its margin to the right.
fn map_size(map: &HeatMap) -> (i32, i32) {
    let cells = CELL * map.labels.len() as i32;
    (LABEL + cells + GAP + CELL + MARGIN, TITLE + LABEL + cells + MARGIN)
}

fn size(maps: &[HeatMap]) -> (u32, u32) {
    let sizes = maps.iter().map(map_size);
    let (width, height) = sizes.fold((MARGIN, 0), |(width, height), map| (width + map.0, height.max(map.1)));
    (width as u32, height as u32)
}

/// White for 0, dark blue for 1. The root in between, so that small weights show.
fn color(weight: f32) -> RGBColor {
    let mix = |light: f32, dark: f32| (light + (dark - light) * weight.clamp(0.0, 1.0).sqrt()) as u8;
    RGBColor(mix(255.0, 8.0), mix(255.0, 48.0), mix(255.0, 107.0))
}

fn draw<B: DrawingBackend>(root: &DrawingArea<B, Shift>, maps: &[HeatMap]) -> Result<(), Box<dyn Error>>
where
    B::ErrorType: 'static,
{
    root.fill(&WHITE)?;
    let mut left = MARGIN;
    for map in maps {
        draw_map(root, map, left)?;
        left += map_size(map).0;
    }
    root.present()?;
    Ok(())
}

fn draw_map<B: DrawingBackend>(root: &DrawingArea<B, Shift>, map: &HeatMap, left: i32) -> Result<(), Box<dyn Error>>
where
    B::ErrorType: 'static,
{
    let font = |size: u32| ("sans-serif", size).into_font();
    let text = |text: &str, at: (i32, i32), font: FontDesc, color: &RGBColor, h_pos: HPos| {
        let style = font.color(color).pos(Pos::new(h_pos, VPos::Center));
        root.draw(&Text::new(text.to_owned(), at, style))
    };
    let [cells_left, cells_top] = [left + LABEL, TITLE + LABEL];
    let column = |index: usize| {
        let is_last = index == map.labels.len();
        cells_left + CELL * index as i32 + if is_last { GAP } else { 0 }
    };
    let row_top = |index: usize| cells_top + CELL * index as i32;

    text(&map.title, (cells_left, TITLE / 2), font(18), &BLACK, HPos::Left)?;
    let elsewhere = "elsewhere".to_owned();
    for (index, label) in map.labels.iter().chain([&elsewhere]).enumerate() {
        let upwards = font(15).transform(FontTransform::Rotate270);
        text(label, (column(index) + CELL / 2, cells_top - 6), upwards, &BLACK, HPos::Left)?;
    }
    for (index, (label, weights)) in map.labels.iter().zip(&map.rows).enumerate() {
        let top = row_top(index);
        text(label, (cells_left - 6, top + CELL / 2), font(15), &BLACK, HPos::Right)?;
        let elsewhere = 1.0 - weights.iter().sum::<f32>();
        for (key, &weight) in weights.iter().chain([&elsewhere]).enumerate() {
            let (x, border) = (column(key), RGBColor(225, 225, 225));
            let corners = [(x, top), (x + CELL, top + CELL)];
            root.draw(&Rectangle::new(corners, color(weight).filled()))?;
            root.draw(&Rectangle::new(corners, border))?;
            if weight >= 0.1 {
                let shade = if weight > 0.25 { WHITE } else { BLACK };
                let percent = format!("{:.0}", 100.0 * weight);
                text(&percent, (x + CELL / 2, top + CELL / 2), font(12), &shade, HPos::Center)?;
            }
        }
    }
    Ok(())
}
