//! What the fuzz targets draw: element types, sizes, memory layouts, masks, instruction sets.

pub mod answer;
pub mod bounds;
pub mod layer;
pub mod packed;
pub mod scores;

use std::ffi::{CStr, c_char};
use std::ops::{Add, AddAssign, Div, Mul, Sub};

use arbitrary::Arbitrary;
use fused_attention::{Accumulator, AttentionConfig, CausalAlignment, Element, InstructionSet, TensorView, bf16, f16};

/// AddressSanitizer asks for this when a target starts: what is too large to allocate comes back as an error, and does not end the process.
#[unsafe(no_mangle)]
extern "C" fn __asan_default_options() -> *const c_char {
    const OPTIONS: &CStr = c"allocator_may_return_null=1";
    OPTIONS.as_ptr()
}

/// Bits of a NaN that no computation makes: marks memory that must, or must not, be written.
pub const CANARY: u32 = 0xffed_cafe;

/// An element type, as the targets need it.
pub trait Number: Element<Acc: Real> + PartialEq {
    /// A NaN that no computation makes.
    const CANARY: Self;
    /// Half a unit in the last place, relative to the number, where rounding to this type comes on top of the accumulator's.
    const ROUNDING: f64;
    /// The same for subnormal numbers, absolute.
    const SMALLEST_ROUNDING: f64;

    /// The nearest number to `value` in f32 (or f64). Not `half`'s own conversion from f64, which drops the lower half of the bits.
    fn rounded(value: f64) -> Self;
    fn from_low_bits(bits: u64) -> Self;
    fn bits(self) -> u64;
}

/// The arithmetic of an accumulator.
pub trait Real:
    Accumulator + PartialOrd + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self> + AddAssign
{
    const EPSILON: f64;
    const NEG_INFINITY: Self;
    const NAN: Self;

    fn real(value: f64) -> Self;
    fn exp(self) -> Self;
}

macro_rules! number {
    ($number:ty, $bits:ty, $canary:expr, $rounding:expr, $smallest:expr, $rounded:expr) => {
        impl Number for $number {
            const CANARY: Self = Self::from_bits($canary);
            const ROUNDING: f64 = $rounding;
            const SMALLEST_ROUNDING: f64 = $smallest;

            fn rounded(value: f64) -> Self {
                $rounded(value)
            }
            fn from_low_bits(bits: u64) -> Self {
                Self::from_bits(bits as $bits)
            }
            fn bits(self) -> u64 {
                self.to_bits().into()
            }
        }
    };
}

number!(f32, u32, CANARY, 0.0, 0.0, |value| value as f32);
number!(f64, u64, 0xffed_cafe_dead_beef, 0.0, 0.0, |value| value);
number!(f16, u16, 0xfeed, 1.0 / 2048.0, 1.0 / (1u64 << 25) as f64, |value| f16::from_f32(value as f32));
number!(bf16, u16, 0xffed, 1.0 / 256.0, 1e-40, |value| bf16::from_f32(value as f32));

macro_rules! real {
    ($real:ident) => {
        impl Real for $real {
            const EPSILON: f64 = $real::EPSILON as f64;
            const NEG_INFINITY: Self = $real::NEG_INFINITY;
            const NAN: Self = $real::NAN;

            fn real(value: f64) -> Self {
                value as $real
            }
            fn exp(self) -> Self {
                self.exp()
            }
        }
    };
}

real!(f32);
real!(f64);

/// A size, mostly a small one.
#[derive(Debug, Clone, Copy, Arbitrary)]
pub enum Size {
    Tiny(u8),
    Small(u8),
    Large(u16),
    Any(usize),
    BelowMax(u8),
    BelowHalf(u8),
    Power(u8),
}

impl Size {
    pub fn get(self) -> usize {
        match self {
            Self::Tiny(n) => usize::from(n % 5),
            Self::Small(n) => usize::from(n % 70),
            Self::Large(n) => usize::from(n % 1024),
            Self::Any(n) => n,
            Self::BelowMax(n) => usize::MAX - usize::from(n),
            Self::BelowHalf(n) => isize::MAX as usize - usize::from(n),
            Self::Power(n) => 1usize.rotate_left(n.into()),
        }
    }
}

/// How a tensor lies in memory.
#[derive(Debug, Clone, Copy, Arbitrary)]
pub struct Memory {
    order: u8,
    gaps: [u8; 4],
    repeated: u8,
}

impl Memory {
    /// Strides of distinct elements for `shape`: some order of the axes, with gaps of up to 3 elements at each. `None`
    /// where a product overflows.
    pub fn strides(&self, shape: [usize; 4]) -> Option<[usize; 4]> {
        let mut axes = vec![0, 1, 2, 3];
        let mut order = usize::from(self.order % 24);
        let mut strides = [0; 4];
        let mut reach = 1usize;
        for choices in (1..=4).rev() {
            // Mostly unit stride within a row, which has a path of its own.
            let axis = axes.remove(if self.order & 0x80 == 0 { choices - 1 } else { order % choices });
            order /= choices;
            strides[axis] = reach.checked_add(usize::from(self.gaps[axis] % 4))?;
            reach = shape[axis].saturating_sub(1).checked_mul(strides[axis])?.checked_add(reach)?;
        }
        Some(strides)
    }

    /// The same for a tensor that is only read: some axes may repeat their elements.
    pub fn input_strides(&self, shape: [usize; 4]) -> Option<[usize; 4]> {
        let mut strides = self.strides(shape)?;
        for (axis, stride) in strides.iter_mut().enumerate() {
            if self.repeated & (0x11 << axis) == 0x11 << axis {
                *stride = 0;
            }
        }
        Some(strides)
    }
}

/// Elements that a slice must have for this shape and these strides; `None` where that overflows.
pub fn reach(shape: [usize; 4], strides: [usize; 4]) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().zip(strides).try_fold(1usize, |n, (size, stride)| n.checked_add((size - 1).checked_mul(stride)?))
}

/// Offsets of all elements.
pub fn offsets(shape: [usize; 4], strides: [usize; 4]) -> impl Iterator<Item = usize> {
    let [batch, heads, len, dims] = shape;
    let elements = if shape.contains(&0) { 0 } else { batch * heads * len * dims };
    (0..elements).map(move |i| {
        let index = [i / dims / len / heads, i / dims / len % heads, i / dims % len, i % dims];
        index.iter().zip(strides).map(|(i, stride)| i * stride).sum()
    })
}

/// Which keys are visible.
#[derive(Debug, Clone, Copy, Arbitrary)]
pub enum Masked {
    Full,
    BottomRight,
    TopLeft,
}

impl Masked {
    pub fn config(self) -> AttentionConfig {
        match self {
            Self::Full => AttentionConfig::full(),
            Self::BottomRight => AttentionConfig::causal(),
            Self::TopLeft => AttentionConfig::causal().with_causal_alignment(CausalAlignment::TopLeft),
        }
    }
}

/// Every set that can run here, the wide portable ones included.
pub fn instruction_sets() -> Vec<InstructionSet> {
    InstructionSet::available().chain([InstructionSet::portable_256(), InstructionSet::portable_512()]).collect()
}

/// A value that is not a plain number, somewhere.
#[derive(Debug, Clone, Copy, Arbitrary)]
pub struct Special {
    tensor: u8,
    place: u32,
    kind: u8,
    payload: u32,
}

impl Special {
    /// Puts it into the memory of a tensor, if that has any.
    fn put<T: Number>(self, data: &mut [T]) {
        let len = data.len();
        if len > 0 {
            data[self.place as usize % len] = self.value();
        }
    }

    fn value<T: Number>(self) -> T {
        let infinity = T::rounded(f64::INFINITY).bits();
        match self.kind % 4 {
            0 => T::from_low_bits(infinity),
            1 => T::rounded(f64::NEG_INFINITY),
            2 => T::rounded(0.0),
            // Any NaN: exponent all ones, some bit below it.
            _ => T::from_low_bits(u64::from(self.payload) << 32 >> self.payload % 33 | infinity | 1),
        }
    }
}

/// Puts those of tensor `which` of three (Q, K, V) into its memory.
pub fn put_specials<T: Number>(specials: &[Option<Special>], which: usize, data: &mut [T]) {
    specials
        .iter()
        .flatten()
        .filter(|special| usize::from(special.tensor % 3) == which)
        .for_each(|special| special.put(data));
}

/// A tensor over its own memory, of which nothing lies past the last element.
pub struct Tensor<T> {
    pub data: Box<[T]>,
    pub shape: [usize; 4],
    pub strides: [usize; 4],
}

impl<T: Copy> Tensor<T> {
    /// `between` is what lies in the gaps.
    pub fn new(
        shape: [usize; 4],
        strides: Option<[usize; 4]>,
        between: T,
        mut value: impl FnMut([usize; 4]) -> T,
    ) -> Option<Self> {
        let strides = strides?;
        let mut data = vec![between; reach(shape, strides)?].into_boxed_slice();
        let [_, heads, len, dims] = shape;
        for (i, offset) in offsets(shape, strides).enumerate() {
            data[offset] = value([i / dims / len / heads, i / dims / len % heads, i / dims % len, i % dims]);
        }
        Some(Self { data, shape, strides })
    }

    pub fn view(&self) -> TensorView<'_, T> {
        TensorView::with_strides(&self.data, self.shape, self.strides).expect("large enough by construction")
    }
}

/// xorshift64*, to about N(0, 1) in steps of 1/64: the sum of four uniform numbers.
pub fn normal(state: &mut u64) -> f64 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    let bytes = state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_be_bytes();
    (bytes[..4].iter().map(|&byte| i32::from(byte)).sum::<i32>() - 510) as f64 / 148.0
}

/// NaN where NaN is expected, the same infinity where that is, else within `bound`.
pub fn agree(found: f64, expected: f64, bound: f64) -> bool {
    if expected.is_finite() {
        found.is_finite() && !((found - expected).abs() > bound) // no bound where that is NaN
    } else {
        found == expected || found.is_nan() && expected.is_nan()
    }
}
