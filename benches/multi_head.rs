//! The whole layer beside its parts: four bare products by `gemm`, and attention on tensors that lie as it likes them best. Causal self-attention,
//! `d_model` 1024, 16 heads. First a table, for which layer and parts run in turns: the layer's time as a multiple of that of its parts, and what
//! of it the parts take. Then criterion's.
//!
//! `cargo bench --bench multi_head`

use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput};
use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionOutputs, AttentionPlan, AttentionShape, Capacity, Element, KvCache,
    MultiHeadAttention, MultiHeadInputs, MultiHeadShape, MultiHeadWorkspace, Parallelism, Projection, Rotary,
    RotaryPairing, TensorView, TensorViewMut, WeightStorage, Workspace, bf16, f16,
};

const D_MODEL: usize = 1024;
const HEADS: usize = 16;
const LENS: [usize; 2] = [512, 2048];
/// Times that the parts run in turns.
const ROUNDS: usize = 25;

/// Where the work runs, and how gemm is told.
fn places() -> Vec<(&'static str, Parallelism)> {
    let mut places = vec![("serial", Parallelism::Serial)];
    #[cfg(feature = "rayon")]
    places.push(("rayon", Parallelism::Rayon));
    places
}

fn gemm_parallelism(parallelism: Parallelism) -> gemm::Parallelism {
    match parallelism {
        Parallelism::Serial => gemm::Parallelism::None,
        _ => gemm::Parallelism::Rayon(0),
    }
}

/// Numbers in -1..1.
fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// The four weights, each `[D_MODEL, D_MODEL]`, of a size that keeps tokens about as large.
fn weights() -> [Vec<f32>; 4] {
    [1, 2, 3, 4].map(|seed| numbers(D_MODEL * D_MODEL, seed).into_iter().map(|x| x / 18.0).collect())
}

/// A layer, and what it needs.
struct Layer<T: Element<Acc = f32>> {
    layer: MultiHeadAttention<'static, T>,
    workspace: MultiHeadWorkspace,
    out: Vec<f32>,
}

impl<T: Element<Acc = f32>> Layer<T> {
    fn new(storage: WeightStorage, is_fused: bool, has_bias: bool, narrow: impl Fn(f32) -> T) -> Self {
        let shape = MultiHeadShape::new(D_MODEL, HEADS).expect("a valid shape");
        let projection = |weight: &[f32], out: usize| {
            let weight: Vec<T> = weight.iter().map(|&x| narrow(x)).collect();
            let shape = if storage == WeightStorage::OutIn { [out, D_MODEL] } else { [D_MODEL, out] };
            let projection = Projection::stored(weight, storage, shape).expect("a valid shape");
            if has_bias { projection.with_bias(&numbers(out, 9)).expect("one for each output") } else { projection }
        };
        let [q, k, v, out] = weights();
        let layer = if is_fused {
            let qkv = [q, k, v].concat(); // whichever way it is stored, some numbers
            MultiHeadAttention::from_fused_qkv(shape, projection(&qkv, 3 * D_MODEL), projection(&out, D_MODEL))
        } else {
            let [q, k, v, out] = [q, k, v, out].map(|weight| projection(&weight, D_MODEL));
            MultiHeadAttention::new(shape, q, k, v, out)
        };
        Self { layer: layer.expect("projections of this shape"), workspace: MultiHeadWorkspace::new(), out: Vec::new() }
    }

    fn with_rotary(mut self) -> Self {
        let rotary = Rotary::new(D_MODEL / HEADS, RotaryPairing::HalfSplit).expect("even");
        self.layer = self.layer.with_rotary(rotary).expect("as many features as a head has");
        self
    }

    fn run(&mut self, x: &[f32], config: &AttentionConfig) {
        self.out.resize(x.len(), 0.0);
        let inputs = MultiHeadInputs::new(x, [1, x.len() / D_MODEL, D_MODEL]);
        self.layer.forward_into(&inputs, &mut self.out, config, &mut self.workspace).expect("a valid call");
    }
}

/// The parts of a layer, on memory of their own.
struct Parts {
    weights: [Vec<f32>; 4],
    /// `[tokens, D_MODEL]` each.
    projected: [Vec<f32>; 4],
    /// `[1, HEADS, tokens, D_MODEL / HEADS]` each.
    heads: [Vec<f32>; 3],
    context: Vec<f32>,
    plan: AttentionPlan,
    workspace: Workspace,
}

impl Parts {
    fn new(len: usize, config: &AttentionConfig) -> Self {
        let head_dim = D_MODEL / HEADS;
        let shape = AttentionShape {
            batch: 1,
            num_heads: HEADS,
            num_kv_heads: HEADS,
            q_len: len,
            kv_len: len,
            head_dim,
            value_dim: head_dim,
        };
        let plan = AttentionPlan::new(&shape, config).expect("a valid shape");
        let workspace = Workspace::for_plan(&plan).expect("small enough for memory");
        Self {
            weights: weights(),
            projected: [0; 4].map(|_| vec![0.0; len * D_MODEL]),
            heads: [5, 6, 7].map(|seed| numbers(len * D_MODEL, seed)),
            context: vec![0.0; len * D_MODEL],
            plan,
            workspace,
        }
    }

    /// The products of weights stored `[out, in]`.
    fn project(&mut self, x: &[f32], parallelism: Parallelism) {
        let Self { weights, projected, .. } = self;
        for (weight, to) in weights.iter().zip(projected) {
            assert!(weight.len() == D_MODEL * D_MODEL && to.len() == x.len());
            let (width, stride) = (D_MODEL, D_MODEL as isize);
            // SAFETY: contiguous matrices of these sizes, asserted above.
            #[allow(unsafe_code)]
            unsafe {
                gemm::gemm(
                    x.len() / D_MODEL,
                    width,
                    width,
                    to.as_mut_ptr(),
                    1,
                    stride,
                    false,
                    x.as_ptr(),
                    1,
                    stride,
                    weight.as_ptr(),
                    stride,
                    1,
                    0.0,
                    1.0,
                    false,
                    false,
                    false,
                    gemm_parallelism(parallelism),
                );
            }
        }
    }

    fn attend(&mut self) {
        let shape = [1, HEADS, self.context.len() / D_MODEL, D_MODEL / HEADS];
        let [q, k, v] = self.heads.each_ref().map(|heads| TensorView::from_bhsd(heads, shape).expect("of this shape"));
        let out = TensorViewMut::from_bhsd(&mut self.context, shape).expect("of this shape");
        let mut outputs = AttentionOutputs::new(out);
        self.plan.run(&AttentionInputs::new(q, k, v), &mut outputs, &mut self.workspace).expect("planned for it");
    }
}

fn milliseconds(run: impl FnOnce()) -> f64 {
    let started = Instant::now();
    run();
    started.elapsed().as_secs_f64() * 1e3
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Layers, and parts, in turns: medians.
fn print_table() {
    println!("   T threads   projections  attention       sum   layer: ms, multiple of the sum, in brackets its share");
    for (len, (place, parallelism)) in LENS.into_iter().flat_map(|len| places().into_iter().map(move |p| (len, p))) {
        let config = AttentionConfig::causal().with_parallelism(parallelism);
        let x = numbers(len * D_MODEL, 8);
        let mut parts = Parts::new(len, &config);
        let mut layers = [
            ("[out, in]", Layer::new(WeightStorage::OutIn, false, false, |x| x)),
            ("[in, out]", Layer::new(WeightStorage::InOut, false, false, |x| x)),
            ("fused", Layer::new(WeightStorage::OutIn, true, false, |x| x)),
            ("biases", Layer::new(WeightStorage::OutIn, false, true, |x| x)),
            ("biases, rotary", Layer::new(WeightStorage::OutIn, false, true, |x| x).with_rotary()),
        ];
        let mut narrow = [("f16", Layer::new(WeightStorage::OutIn, false, false, f16::from_f32))];
        let mut narrow_bf16 = [("bf16", Layer::new(WeightStorage::OutIn, false, false, bf16::from_f32))];
        let mut times: [Vec<f64>; 9] = Default::default();
        for round in 0..=ROUNDS {
            let mut all = vec![milliseconds(|| parts.project(&x, parallelism)), milliseconds(|| parts.attend())];
            all.extend(layers.iter_mut().map(|(_, layer)| milliseconds(|| layer.run(&x, &config))));
            all.extend(narrow.iter_mut().map(|(_, layer)| milliseconds(|| layer.run(&x, &config))));
            all.extend(narrow_bf16.iter_mut().map(|(_, layer)| milliseconds(|| layer.run(&x, &config))));
            if round > 0 {
                times.iter_mut().zip(all).for_each(|(times, time)| times.push(time)); // the first warms up
            }
        }
        let [projections, attention, layers_ms @ ..] = times.map(median);
        let sum = projections + attention;
        print!("{len:4} {place:7} {projections:10.2} ms {attention:7.2} ms {sum:7.2} ms");
        let names = layers.iter().map(|(name, _)| *name).chain(narrow.iter().map(|(name, _)| *name)).chain(["bf16"]);
        for (name, layer) in names.zip(layers_ms) {
            print!("   {name} {layer:.2} ms {:.3}", layer / sum);
        }
        println!("   (projections {:.0} %, attention {:.0} %)", 100.0 * projections / sum, 100.0 * attention / sum);
    }
}

fn main() {
    if std::env::args().any(|argument| argument == "--bench") {
        print_table();
    }
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    for len in LENS {
        let mut group = criterion.benchmark_group(format!("multi_head/d{D_MODEL}_h{HEADS}/t{len}"));
        group.throughput(Throughput::Elements(len as u64));
        let x = numbers(len * D_MODEL, 8);
        for (place, parallelism) in places() {
            let config = AttentionConfig::causal().with_parallelism(parallelism);
            let mut layer = Layer::new(WeightStorage::OutIn, false, false, |x| x);
            group.bench_function(format!("layer/{place}"), |bencher| bencher.iter(|| layer.run(&x, &config)));
            let mut parts = Parts::new(len, &config);
            group.bench_function(format!("projections/{place}"), |bencher| {
                bencher.iter(|| parts.project(&x, parallelism));
            });
            group.bench_function(format!("attention/{place}"), |bencher| bencher.iter(|| parts.attend()));
        }
    }
    bench_steps(&mut criterion);
    criterion.final_summary();
}

/// One token over a cache of 1024.
fn bench_steps(criterion: &mut Criterion) {
    fn bench<T: Element<Acc = f32>>(group: &mut BenchmarkGroup<'_, WallTime>, name: &str, narrow: impl Fn(f32) -> T) {
        for (place, parallelism) in places() {
            let config = AttentionConfig::causal().with_parallelism(parallelism);
            let storages = [WeightStorage::OutIn, WeightStorage::InOut];
            for (tokens, storage) in [1, 4, 5].into_iter().flat_map(|tokens| storages.map(|storage| (tokens, storage)))
            {
                let Layer { layer, mut workspace, .. } = Layer::new(storage, false, false, &narrow);
                let shape = layer.shape().kv_cache_shape(1, 1);
                let mut cache = KvCache::<f32>::new(&shape, Capacity::Fixed(1024 + tokens)).expect("memory");
                let (x, prompt) = (numbers(tokens * D_MODEL, 8), numbers(1024 * D_MODEL, 9));
                layer.step(&MultiHeadInputs::new(&prompt, [1, 1024, D_MODEL]), &mut cache, 0, &config).expect("valid");
                let mut out = vec![0.0; tokens * D_MODEL];
                group.bench_function(format!("{name}/{storage:?}/{tokens}/{place}"), |bencher| {
                    bencher.iter(|| {
                        cache.truncate(1024).expect("as many");
                        let inputs = MultiHeadInputs::new(&x, [1, tokens, D_MODEL]);
                        layer.step_into(&inputs, &mut out, &mut cache, 0, &config, &mut workspace).expect("valid");
                    });
                });
            }
        }
    }
    let mut group = criterion.benchmark_group(format!("multi_head/d{D_MODEL}_h{HEADS}/step_at_1024"));
    bench(&mut group, "f32", |x| x);
    bench(&mut group, "bf16", bf16::from_f32);
}
