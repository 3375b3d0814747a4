//! Rotary embedding: the definition in f64, and what it is for: scores depend on distances alone.

use crate::common::layer::{Form, TextbookLayer, TextbookRotary, as_f32, normal_tokens};
use crate::common::{Layout, Tensor, instruction_sets};
use fused_attention::{
    AttentionConfig, AttentionError, MultiHeadAttention, MultiHeadInputs, MultiHeadShape, Rotary, RotaryPairing,
    RotaryScaling,
};

const PAIRINGS: [RotaryPairing; 2] = [RotaryPairing::HalfSplit, RotaryPairing::Interleaved];

fn features(tensor: &Tensor, [batch, head, token]: [usize; 3]) -> Vec<f64> {
    (0..tensor.shape[3]).map(|d| f64::from(tensor.get([batch, head, token, d]))).collect()
}

/// Every layout, more pairs than are computed at a time, positions that begin anywhere.
#[test]
fn features_are_turned_as_defined() {
    for (head_dim, dim) in [(2, 2), (64, 64), (80, 20), (300, 260), (7, 6)] {
        for (pairing, first) in PAIRINGS.into_iter().zip([0, 1]).chain(PAIRINGS.into_iter().zip([31, 100_003])) {
            for layout in [Layout::Bhsd, Layout::Bshd, Layout::Transposed, Layout::PaddedRows, Layout::Interleaved] {
                let textbook = TextbookRotary { dim, pairing, base: 10_000.0 };
                let shape = [2, 3, 40, head_dim];
                let before = Tensor::<f32>::from_fn(shape, layout, crate::common::pattern);
                let mut after = before.clone();
                textbook.rotary().apply(&mut after.view_mut(), first).unwrap();
                after.assert_gaps_untouched();
                for row in (0..2).flat_map(|b| (0..3).flat_map(move |h| (0..40).map(move |t| [b, h, t]))) {
                    let mut expected = features(&before, row);
                    textbook.turn(&mut expected, first + row[2]);
                    for (d, (found, expected)) in features(&after, row).into_iter().zip(expected).enumerate() {
                        // Cosine and sine are rounded once, and so are two products and a sum.
                        let size = features(&before, row).iter().fold(0.0f64, |size, x| size.max(x.abs()));
                        let bound = 2.0 * size * f64::from(f32::EPSILON);
                        assert!(
                            (found - expected).abs() <= bound,
                            "{head_dim} {dim} {pairing:?} {row:?} {d}: {found}, not {expected}"
                        );
                        assert!(d < dim || found == features(&before, row)[d], "features behind the turned ones stay");
                    }
                }
            }
        }
    }
}

/// The same position is turned alike, wherever a call begins: a step does what the prompt would have done.
#[test]
fn a_token_is_turned_alike_in_every_call() {
    let rotary = Rotary::new(16, RotaryPairing::Interleaved).unwrap();
    let before = Tensor::<f32>::from_fn([1, 2, 100, 16], Layout::Bshd, crate::common::pattern);
    let mut all = before.clone();
    rotary.apply(&mut all.view_mut(), 5).unwrap();
    for token in 0..100 {
        let mut one = before.part(2, token..token + 1);
        rotary.apply(&mut one.view_mut(), 5 + token).unwrap();
        assert_eq!(one.values(), all.part(2, token..token + 1).values(), "token {token}");
    }
}

fn product(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[test]
fn scores_depend_on_distances_alone() {
    for pairing in PAIRINGS {
        let rotary = Rotary::new(32, pairing).unwrap().with_base(500.0).unwrap();
        let [q, k] = [1, 2].map(|seed| as_f32(&normal_tokens(32, seed)));
        let turned = |row: &[f32], position: usize| {
            let mut tensor = Tensor::<f32>::from_fn([1, 1, 1, 32], Layout::Bhsd, |[.., d]| row[d]);
            rotary.apply(&mut tensor.view_mut(), position).unwrap();
            features(&tensor, [0; 3])
        };
        let score = |query: usize, key: usize| product(&turned(&q, query), &turned(&k, key));
        let size = product(&turned(&q, 0), &turned(&q, 0)).max(product(&turned(&k, 0), &turned(&k, 0)));
        for distance in [0, 1, 7, 300] {
            let here = score(distance, 0);
            for shift in [1, 31, 32, 1000, 1_000_000] {
                let there = score(distance + shift, shift);
                assert!(
                    (here - there).abs() <= 4.0 * size * f64::from(f32::EPSILON),
                    "{distance} {shift}: {here} {there}"
                );
            }
        }
        assert!((score(1, 0) - score(0, 1)).abs() > 0.1, "the sign of a distance counts");
        assert!((score(1, 0) - score(5, 0)).abs() > 0.1, "and so does its size");
    }
}

/// The same through a layer.
#[test]
fn a_layer_does_not_see_where_its_tokens_stand() {
    for pairing in PAIRINGS {
        let shape = MultiHeadShape { num_kv_heads: 2, ..MultiHeadShape::new(32, 4).unwrap() };
        let mut textbook = TextbookLayer::normal::<f32>(shape, [true; 4], 1);
        let plain: MultiHeadAttention = textbook.layer(Form::ALL[0]).unwrap();
        textbook.rotary = Some(TextbookRotary { dim: 8, pairing, base: 10_000.0 });
        let layer: MultiHeadAttention = textbook.layer(Form::ALL[0]).unwrap();
        assert_eq!((layer.rotary().unwrap().rotary_dim(), plain.rotary()), (8, None));
        let x = as_f32(&normal_tokens(20 * 32, 2));
        let inputs = MultiHeadInputs::new(&x, [1, 20, 32]);
        for set in instruction_sets() {
            let config = AttentionConfig::causal().with_instruction_set(set);
            let run = |layer: &MultiHeadAttention<'_>, first| {
                layer.forward(&inputs.with_first_position(first), &config).unwrap()
            };
            let differ = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            let here = run(&layer, 0);
            assert!(differ(&here, &run(&layer, 12_345)) < 1e-5);
            assert!(differ(&here, &run(&plain, 0)) > 1e-2, "but it sees in which order they stand");
        }
    }
}

#[test]
fn scaling_changes_the_frequencies_as_models_do() {
    let plain = Rotary::new(64, RotaryPairing::HalfSplit).unwrap().with_base(500_000.0).unwrap();
    let scaled = |scaling| plain.clone().with_scaling(scaling).unwrap().frequencies().to_vec();
    for (pair, frequency) in plain.frequencies().iter().enumerate() {
        let expected = 500_000f64.powf(-2.0 * pair as f64 / 64.0);
        assert!((frequency / expected - 1.0).abs() < 1e-14);
    }
    assert_eq!(scaled(RotaryScaling::None), plain.frequencies());
    let linear = scaled(RotaryScaling::Linear { factor: 4.0 });
    assert!(linear.iter().zip(plain.frequencies()).all(|(scaled, plain)| *scaled == plain / 4.0));

    let ntk = scaled(RotaryScaling::Ntk { factor: 4.0 });
    let ratios: Vec<f64> = ntk.iter().zip(plain.frequencies()).map(|(scaled, plain)| scaled / plain).collect();
    assert_eq!(ratios[0], 1.0);
    assert!((ratios[31] - 0.25).abs() < 1e-12 && ratios.windows(2).all(|pair| pair[1] < pair[0]), "{ratios:?}");

    // Llama 3.1's numbers. The formula as its code has it: by wavelengths.
    let (factor, low, high, original_len) = (8.0, 1.0, 4.0, 8192);
    let llama3 = scaled(RotaryScaling::Llama3 { factor, low_freq_factor: low, high_freq_factor: high, original_len });
    let mut kinds = [0; 3];
    for (scaled, frequency) in llama3.iter().zip(plain.frequencies()) {
        let (len, wavelength) = (original_len as f64, std::f64::consts::TAU / frequency);
        let expected = if wavelength < len / high {
            kinds[0] += 1;
            *frequency
        } else if wavelength > len / low {
            kinds[1] += 1;
            frequency / factor
        } else {
            kinds[2] += 1;
            let smooth = (len / wavelength - low) / (high - low);
            (1.0 - smooth) * frequency / factor + smooth * frequency
        };
        assert!((scaled / expected - 1.0).abs() < 1e-12, "{scaled}, not {expected}");
    }
    assert!(kinds.iter().all(|&n| n > 0), "{kinds:?}: some stay, some are divided, some lie between");
    // The order of the setters does not matter.
    let other = Rotary::new(64, RotaryPairing::HalfSplit).unwrap().with_scaling(RotaryScaling::Ntk { factor: 4.0 });
    assert_eq!(other.unwrap().with_base(500_000.0).unwrap().frequencies(), ntk);
}

#[test]
fn rotary_numbers_that_make_no_sense_are_refused() {
    let new = |dim| Rotary::new(dim, RotaryPairing::HalfSplit);
    for rotary_dim in [0, 1, 7] {
        assert_eq!(new(rotary_dim).unwrap_err(), AttentionError::InvalidRotaryDim { rotary_dim });
    }
    for value in [0.0, -1.0, f64::INFINITY] {
        let error = new(4).unwrap().with_base(value).unwrap_err();
        assert_eq!(error, AttentionError::InvalidRotaryNumber { name: "base", value, above: 0.0 });
        for scaling in [RotaryScaling::Linear { factor: value }, RotaryScaling::Ntk { factor: value }] {
            let error = new(4).unwrap().with_scaling(scaling).unwrap_err();
            assert_eq!(error, AttentionError::InvalidRotaryNumber { name: "factor", value, above: 0.0 });
        }
    }
    assert!(new(4).unwrap().with_base(f64::NAN).is_err());
    // So near 0 that angles overflow, which would turn features to NaN.
    for base in [f64::MIN_POSITIVE, 5e-324, 1e-305] {
        let error = new(64).unwrap().with_base(base).unwrap_err();
        assert!(matches!(error, AttentionError::InvalidRotaryNumber { value: f64::INFINITY, .. }), "{base}: {error}");
        let error = new(64).unwrap().with_scaling(RotaryScaling::Linear { factor: f64::MIN_POSITIVE }).unwrap_err();
        assert!(matches!(error, AttentionError::InvalidRotaryNumber { value: f64::INFINITY, .. }), "{error}");
    }
    // What is large but finite turns all positions to numbers.
    let mut tensor = Tensor::<f32>::from_fn([1, 1, 2, 64], Layout::Bhsd, crate::common::pattern);
    new(64).unwrap().with_base(1e-100).unwrap().apply(&mut tensor.view_mut(), usize::MAX).unwrap();
    assert!(tensor.values().iter().all(|x| x.is_finite()));
    let llama3 = |[factor, low_freq_factor, high_freq_factor]: [f64; 3], original_len| {
        let scaling = RotaryScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_len };
        new(4).unwrap().with_scaling(scaling).unwrap_err().to_string()
    };
    let message = llama3([8.0, 4.0, 4.0], 8192);
    assert_eq!(message, "high_freq_factor of a rotary embedding is 4, it must be finite and above 4");
    assert!(llama3([0.0, 1.0, 4.0], 8192).starts_with("factor of"));
    assert!(llama3([8.0, 0.0, 4.0], 8192).starts_with("low_freq_factor of"));
    assert!(llama3([8.0, 1.0, 4.0], 0).starts_with("original_len of"));

    let mut tensor = Tensor::<f32>::from_fn([1, 1, 2, 6], Layout::Bhsd, crate::common::pattern);
    let before = tensor.values();
    let error = new(8).unwrap().apply(&mut tensor.view_mut(), 0).unwrap_err();
    assert_eq!(error, AttentionError::RotaryDimTooLarge { rotary_dim: 8, head_dim: 6 });
    assert_eq!(tensor.values(), before);
    let textbook = TextbookLayer::normal::<f32>(MultiHeadShape::new(12, 2).unwrap(), [false; 4], 1);
    let layer: MultiHeadAttention = textbook.layer(Form::ALL[0]).unwrap();
    assert_eq!(layer.with_rotary(new(8).unwrap()).unwrap_err(), error);
    // Nothing to turn.
    new(4).unwrap().apply(&mut Tensor::<f32>::unwritten([2, 0, 3, 4], Layout::Bhsd).view_mut(), 0).unwrap();
}
