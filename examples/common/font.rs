//! The font of drawings. plotters' `ab_glyph` draws text without any library of the system, but wants to be given a font; this one comes as a
//! crate.

use plotters::style::{FontStyle, register_font};

/// Makes "sans-serif" known to plotters, for measuring text in SVG and for drawing it in PNG.
pub fn register() {
    // Fails only where the file is no font.
    let _ = register_font("sans-serif", FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT);
}
