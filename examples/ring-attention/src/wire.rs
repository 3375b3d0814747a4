//! The element types that travel: [`Wire`].

use fused_attention::{Element, bf16};
use half::slice::HalfFloatSliceExt;
use mpi::datatype::Equivalence;

/// An element of K and V. It travels as it lies in memory: bf16 halves the bytes on the wire, and the memory.
pub trait Wire: Element<Acc = f32> {
    /// What MPI takes it for.
    type Word: Equivalence + Copy;
    /// Its name.
    const NAME: &'static str;

    /// The same memory, for MPI.
    fn words(elements: &[Self]) -> &[Self::Word];

    /// The same, to be received into.
    fn words_mut(elements: &mut [Self]) -> &mut [Self::Word];

    /// The nearest value of this type.
    fn nearest(value: f32) -> Self;

    /// The value (exact).
    fn value(self) -> f32;
}

impl Wire for f32 {
    type Word = f32;
    const NAME: &'static str = "f32";

    fn words(elements: &[f32]) -> &[f32] {
        elements
    }

    fn words_mut(elements: &mut [f32]) -> &mut [f32] {
        elements
    }

    fn nearest(value: f32) -> f32 {
        value
    }

    fn value(self) -> f32 {
        self
    }
}

impl Wire for bf16 {
    type Word = u16;
    const NAME: &'static str = "bf16";

    fn words(elements: &[bf16]) -> &[u16] {
        elements.reinterpret_cast()
    }

    fn words_mut(elements: &mut [bf16]) -> &mut [u16] {
        elements.reinterpret_cast_mut()
    }

    fn nearest(value: f32) -> bf16 {
        bf16::from_f32(value)
    }

    fn value(self) -> f32 {
        self.to_f32()
    }
}
