"""The peers that are Python packages: pip install torch onnxruntime onnx openvino (any of them), numpy comes with each.

`cargo run --release -- --python python3` runs one process of this for each library and tells it by lines of JSON on stdin what to do:

    {"do": "load", "folder": .., "case": ..}     the tensors q, k, v [batch, heads, tokens, features], as files
    {"do": "prepare", "peer": NAME}              a warm call
    {"do": "turn", "peer": NAME, "seconds": S}   the best seconds of a call in a turn of S
    {"do": "output", "peer": NAME}               writes what the last call computed, as f32, to the file out
    {"do": "memory", "peer": NAME}               bytes that a first call adds at its highest

Each line is answered by one: {} or what was asked for, or {"error": why}.
"""
import ctypes, json, math, os, sys, time

# The answers' own way out: libraries print to stdout.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import numpy as np

SAMPLE_SECONDS = 50e-6  # shorter calls are timed several at a time
WIDTH = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}  # numpy has no bf16: its bits


class Cannot(Exception):
    """Why a peer is not measured in a case."""


class Case:
    def __init__(self, folder, case):
        self.folder = folder
        for key, value in case.items():
            setattr(self, key, value)
        self.group = self.num_heads // self.num_kv_heads
        q_shape = (self.batch, self.num_heads, self.q_len, self.head_dim)
        kv_shape = (self.batch, self.num_kv_heads, self.kv_len, self.head_dim)
        read = lambda name, shape: np.fromfile(os.path.join(folder, name), WIDTH[self.dtype]).reshape(shape)
        self.q, self.k, self.v = read("q", q_shape), read("k", kv_shape), read("v", kv_shape)

    def short(self):
        """The first tokens: what loads code and starts threads."""
        case = object.__new__(Case)
        case.__dict__.update(self.__dict__)
        case.q_len, case.kv_len = min(self.q_len, 64), min(self.kv_len, 64)
        case.q, case.k, case.v = (np.ascontiguousarray(t[:, :, :64]) for t in (self.q, self.k, self.v))
        return case

    def visible(self):
        """[queries, keys], true = may attend."""
        behind = np.arange(self.q_len)[:, None] + (self.kv_len - self.q_len) - np.arange(self.kv_len)[None, :]
        return (behind >= 0) & (behind < (self.window or self.kv_len + 1))

    @property
    def needs_mask(self):
        """Not causal of equal lengths, and not everything: what only a mask says."""
        return self.window is not None or (self.causal and self.q_len != self.kv_len)


def f32_of(array, dtype):
    array = np.asarray(array)
    if dtype == "bf16":
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def torch_peers():
    import torch

    torch.set_grad_enabled(False)
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def tensors(case):
        torch.set_num_threads(case.threads)
        as_torch = lambda t: torch.from_numpy(t.view(np.int16)).view(torch.bfloat16) if case.dtype == "bf16" else torch.from_numpy(t)
        return as_torch(case.q), as_torch(case.k), as_torch(case.v)

    def output(out):
        return lambda: out[0].float().contiguous().numpy()

    def plain(case):
        q, k, v = tensors(case)
        options = {"enable_gqa": True} if case.group > 1 else {}
        if case.needs_mask:
            options["attn_mask"] = torch.from_numpy(case.visible())
        else:
            options["is_causal"] = case.causal
        out = [None]

        def call():
            out[0] = sdpa(q, k, v, **options)
        return call, output(out)

    def folded(case):
        """The heads of a group as queries of one head: K and V are read once for all."""
        if case.group == 1 or case.q_len != 1 or case.causal or case.window:
            raise Cannot("one query and groups of heads")
        q, k, v = tensors(case)
        q = q.view(case.batch, case.num_kv_heads, case.group, case.head_dim)
        out = [None]

        def call():
            out[0] = sdpa(q, k, v)
        return call, output(out)
    return torch.__version__, {"PyTorch SDPA": plain, "PyTorch SDPA, group in rows": folded}


def onnxruntime_peers():
    import onnxruntime as ort
    from onnx import TensorProto, helper

    ort.set_default_logger_severity(4)
    types = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16}
    ort.disable_telemetry_events()

    def session(case, nodes, inputs, outputs, opset):
        opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(helper.make_graph(nodes, "attention", inputs, outputs), opset_imports=opsets, ir_version=10)
        options = ort.SessionOptions()
        options.intra_op_num_threads = case.threads
        options.inter_op_num_threads = 1
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def dtype_of(case):
        if case.dtype not in types:
            raise Cannot("no %s" % case.dtype)
        return types[case.dtype]

    def bound(session, inputs, outputs):
        """A call whose operands are where they are: nothing is copied in or out."""
        binding = session.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)
        # Binding holds no references.
        return lambda: (inputs, outputs, session.run_with_iobinding(binding))

    value = lambda array: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))

    def attention(case):
        dtype = dtype_of(case)
        info = lambda name, shape, dtype=dtype: helper.make_tensor_value_info(name, dtype, shape)
        inputs = {"Q": value(case.q), "K": value(case.k), "V": value(case.v)}
        infos = [info("Q", case.q.shape), info("K", case.k.shape), info("V", case.v.shape)]
        if case.needs_mask:
            mask = case.visible()
            inputs["mask"] = value(mask)
            infos.append(info("mask", mask.shape, TensorProto.BOOL))
        causal = int(case.causal and not case.needs_mask)
        node = helper.make_node("Attention", list(inputs), ["Y"], is_causal=causal)
        out = value(np.full(case.q.shape, np.nan, case.q.dtype))
        run = session(case, [node], infos, [info("Y", case.q.shape)], 23)
        call = bound(run, inputs, {"Y": out})
        call.output_bytes = case.q.nbytes
        return call, lambda: f32_of(out.numpy(), case.dtype)

    def grouped(case):
        """Past and present in one buffer, as its documentation wants it: a prompt is written into it, a new token behind the others."""
        dtype = dtype_of(case)
        if not case.causal and case.q_len > 1:
            raise Cannot("causal only")
        b, past_len = case.batch, case.kv_len - case.q_len
        tokens = lambda t: np.ascontiguousarray(t.transpose(0, 2, 1, 3)).reshape(b, t.shape[2], -1)
        q = tokens(case.q)
        new_k, new_v = tokens(case.k[:, :, past_len:]), tokens(case.v[:, :, past_len:])
        cache_k, cache_v = value(case.k), value(case.v)
        inputs = {"query": value(q), "key": value(new_k), "value": value(new_v), "past_key": cache_k, "past_value": cache_v,
                  "seqlens_k": value(np.full(b, case.kv_len - 1, np.int32)), "total": value(np.array([case.kv_len], np.int32))}
        shapes = {name: list(v.shape()) for name, v in inputs.items()}
        kind = lambda name: TensorProto.INT32 if name in ("seqlens_k", "total") else dtype
        infos = [helper.make_tensor_value_info(name, kind(name), shapes[name]) for name in inputs]
        out = value(np.full(q.shape, np.nan, q.dtype))
        outputs = {"out": out, "present_key": cache_k, "present_value": cache_v}
        out_infos = [helper.make_tensor_value_info(name, dtype, list(v.shape())) for name, v in outputs.items()]
        attributes = {"num_heads": case.num_heads, "kv_num_heads": case.num_kv_heads}
        if case.window:
            attributes["local_window_size"] = case.window
        node = helper.make_node("GroupQueryAttention", list(inputs), list(outputs), domain="com.microsoft", **attributes)
        run = bound(session(case, [node], infos, out_infos, 20), inputs, outputs)
        run.output_bytes = q.nbytes
        heads = lambda: out.numpy().reshape(b, case.q_len, case.num_heads, case.head_dim).transpose(0, 2, 1, 3)
        return run, lambda: f32_of(heads(), case.dtype)
    return ort.__version__, {"ONNX Runtime GroupQueryAttention": grouped, "ONNX Runtime Attention-23": attention}


def openvino_peers():
    os.environ["CI"] = "true"  # else its import starts a process that tells of its use, and stays behind
    import openvino as ov
    from openvino import opset13 as ops

    core = ov.Core()
    types = {"f32": ov.Type.f32, "f16": ov.Type.f16, "bf16": ov.Type.bf16}

    def compiled(case, q, k, v):
        dtype = types[case.dtype]
        parameters = [ops.parameter(list(t.shape), dtype) for t in (q, k, v)]
        mask = None
        if case.needs_mask:
            mask = ops.parameter([case.q_len, case.kv_len], ov.Type.boolean)
            parameters.append(mask)
        options = {"causal": case.causal and not case.needs_mask}
        node = ops.scaled_dot_product_attention(*parameters[:3], *([mask] if mask else []), **options)
        # Else it would compute f32 in bf16 where the CPU can; and f16 in bf16, which is less exact, where the CPU has no arithmetic in f16.
        has_f16 = "FP16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        precision = ov.Type.f32 if case.dtype == "f16" and not has_f16 else dtype
        config = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": case.threads, "NUM_STREAMS": 1,
                  "PERFORMANCE_HINT": "LATENCY"}
        request = core.compile_model(ov.Model([node], parameters), "CPU", config).create_infer_request()
        arrays = [np.ascontiguousarray(t) for t in (q, k, v)]
        for i, t in enumerate(arrays):
            request.set_input_tensor(i, ov.Tensor(t, list(t.shape), dtype) if case.dtype == "bf16" else ov.Tensor(t, shared_memory=True))
        if mask:
            arrays.append(case.visible())
            request.set_input_tensor(3, ov.Tensor(arrays[3], shared_memory=True))

        def output():
            out = request.get_output_tensor(0)
            if out.element_type == ov.Type.bf16:
                return f32_of(np.array(out.data).view(np.uint16), "bf16").reshape(case.q.shape)
            return f32_of(np.array(out.data), "f32").reshape(case.q.shape)
        return lambda: (arrays, request.infer()), output

    def plain(case):
        if case.group > 1:
            raise Cannot("as many KV heads as heads")
        return compiled(case, case.q, case.k, case.v)

    def folded(case):
        if case.group == 1 or case.q_len != 1 or case.causal or case.window:
            raise Cannot("one query and groups of heads")
        return compiled(case, case.q.reshape(case.batch, case.num_kv_heads, case.group, case.head_dim), case.k, case.v)
    return ov.__version__, {"OpenVINO SDPA": plain, "OpenVINO SDPA, group in rows": folded}


def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))


def measured_memory(prepare, case):
    short, _ = prepare(case.short())
    short()
    call, _ = prepare(case)
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed and is kept for reuse would hide what the call takes
    except AttributeError:
        pass  # not glibc
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")  # resets it to what there is
    before = memory("VmRSS:")
    call()
    # An output that was there before the call is counted as if the call had made it.
    return memory("VmHWM:") - before + getattr(call, "output_bytes", 0)


class Peer:
    def __init__(self, prepare, case):
        self.call, self.output = prepare(case)
        once = self.seconds_of(1)
        if once < 100 * SAMPLE_SECONDS:
            once = self.seconds_of(3)
        self.calls = min(max(math.ceil(SAMPLE_SECONDS / once), 1), 10000)

    def seconds_of(self, calls):
        start = time.perf_counter()
        for _ in range(calls):
            self.call()
        return (time.perf_counter() - start) / calls

    def turn(self, seconds):
        start, best = time.perf_counter(), math.inf
        while True:
            best = min(best, self.seconds_of(self.calls))
            if time.perf_counter() - start >= seconds:
                return best


def main(library):
    version, peers = {"torch": torch_peers, "onnxruntime": onnxruntime_peers, "openvino": openvino_peers}[library]()
    case, ready = None, {}

    def obey(order):
        nonlocal case
        name = order.get("peer")
        if order["do"] == "load":
            ready.clear()
            case = Case(order["folder"], order["case"])
        elif order["do"] == "prepare":
            ready[name] = Peer(peers[name], case)
        elif order["do"] == "turn":
            return {"seconds": ready[name].turn(order["seconds"])}
        elif order["do"] == "output":
            np.ascontiguousarray(ready[name].output(), np.float32).tofile(os.path.join(case.folder, "out"))
        elif order["do"] == "memory":
            return {"bytes": measured_memory(peers[name], case)}
        return {}

    say = lambda answer: print(json.dumps(answer), file=ANSWERS, flush=True)
    say({"version": version, "peers": list(peers)})
    for line in sys.stdin:
        try:
            say(obey(json.loads(line)))
        except Exception as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            say({"error": first[:200]})


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except ImportError as error:
        print(json.dumps({"error": "not installed: %s" % error}), file=ANSWERS, flush=True)
