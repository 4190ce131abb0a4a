"""Every launch of forward and backward, without a GPU: what the compiler writes for a Hopper card, in order, with the bytes it moves and the lines that asked for it.

    python tests/study_launches.py [heads+xsa+fold+mlp] [--all] [--world 8] [--option combo_kernels=True] [--save FOLDER] [--record NAME]

The model's tensors are fakes that say they lie on `cuda`, and the compiler stops where kernels would be built. What one call launches inside is not seen:
a product counts once, whether cuBLAS sums its parts in a second kernel or not, and so does an attention call. `--record` adds the counts to
nbs/results/launches_codegen.json. Needs g++. About a minute.
"""
import ast
import argparse
import collections
import contextlib
import ctypes
import importlib.util
import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROWS, TOKENS = 48, 2048
HOPPER = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
                         max_threads_per_block=1024, warp_size=32, total_memory=140 << 30, shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
                         gcnArchName="", L2_cache_size=50 << 20)
CARD = """#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
struct Hooks : at::CUDAHooksInterface {
    Hooks(at::CUDAHooksArgs) {}
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    int getNumGPUs() const override { return 1; }
};
struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
    c10::Device getDevice() const override { return c10::Device(c10::kCUDA, 0); }
    c10::Stream getStream(c10::Device d) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, d); }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
    void block(void*, const c10::Stream&) const override {}
};
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, Guard); }
namespace at { C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks) }
"""  # a torch built without CUDA asks these before it indexes a fake tensor of that device or differentiates through it


def plug_in():
    "Build and load CARD, before torch is imported, since torch asks once."
    folder, built = Path(importlib.util.find_spec("torch").origin).parent, Path(tempfile.mkdtemp()) / "card.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-std=c++20", f"-I{folder}/include", "-x", "c++", "-", "-o", built, f"-L{folder}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{folder}/lib"], input=CARD, text=True, check=True)
    ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)


plug_in()
import torch  # noqa: E402
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402


class Found(Exception):
    "The code that was wanted."


def hopper(stack: contextlib.ExitStack) -> None:
    "Make torch and Triton believe in one Hopper card; `stack` undoes it."
    import triton
    from torch._dynamo import device_interface
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0, get_active_torch_device=lambda: torch.device("cuda", 0)))
    cuda = {"is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0, "get_device_properties": lambda d=None: HOPPER,
            "get_device_capability": lambda d=None: (9, 0), "is_bf16_supported": lambda *a, **k: True, "synchronize": lambda *a: None, "is_initialized": lambda: True,
            "get_device_name": lambda d=None: HOPPER.name, "_lazy_init": lambda: None, "get_rng_state": lambda *a: torch.zeros(16, dtype=torch.uint8), "set_rng_state": lambda *a: None,
            "_exchange_device": lambda d: 0, "_maybe_exchange_device": lambda d: 0, "current_stream": lambda *a: None}
    for name, f in cuda.items():
        stack.enter_context(mock.patch.object(torch.cuda, name, f))
    for name in ("current_device", "get_device_properties", "device_count", "synchronize"):
        stack.enter_context(mock.patch.object(device_interface.CudaInterface, name, staticmethod(cuda[name])))
    worker = device_interface.CudaInterface.Worker
    stack.enter_context(mock.patch.object(worker, "get_device_properties", staticmethod(cuda["get_device_properties"])))
    stack.enter_context(mock.patch.object(worker, "current_device", staticmethod(cuda["current_device"])))


class OnCpu(TorchDispatchMode):
    "Constants are worked out where there is a processor."

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        return f(*args, **(kwargs | {"device": torch.device("cpu")} if "device" in kwargs else kwargs))


def folded_on_cpu(folder, node, deduce=UniformValueConstantFolder._deduce_value):
    "What the compiler's folding of constants does, there."
    with OnCpu():
        return deduce(folder, node)


def cudnn_attend(q, k, v, choice="auto"):
    "`attend` as cuDNN's operator, which a torch without CUDA would not choose by itself."
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=q.shape[-1] ** -0.5)[0].transpose(1, 2)


def generated(words: set, options: dict, world: int) -> list:
    "Of forward and of backward: the wrapper code, and of each kernel by name the GB it moves and the lines behind it, once for each time it is written."
    import golfnb.model as model_module
    from torch._inductor import config as inductor_config
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode
    from golfnb.config import load_config
    from golfnb.layout import model_layout
    from golfnb.train import training_loss
    codes, made = [], collections.defaultdict(list)

    def noted(scheduling, source, nodes, kernel, define=TritonScheduling.define_kernel):
        name = define(scheduling, source, nodes, kernel)
        parts = getattr(kernel, "sub_kernels", [kernel])
        made[name].append((sum(k.estimate_kernel_num_bytes() for k in parts) / 1e9, asked_by(n for x in nodes for n in (x.get_nodes() if hasattr(x, "get_nodes") else []))))
        return name

    def stop(graph):
        made.clear()
        codes.append((graph.codegen()[0].value, dict(made)))
        if len(codes) == 2:
            raise Found
        return SimpleNamespace(call=lambda args: None, __file__="nothing", key="", cache_key="", cache_linemap=[], runner=None)
    with contextlib.ExitStack() as stack:
        hopper(stack)
        for place, name, stand_in in ((joint_graph, "lazy_init", lambda device: None),  # patterns (of attention, of padding) that it would try on the card
                                      (UniformValueConstantFolder, "_deduce_value", folded_on_cpu), (TritonScheduling, "define_kernel", noted),
                                      (GraphLowering, "compile_to_module", stop), (model_module, "attend", cudnn_attend)):
            stack.enter_context(mock.patch.object(place, name, stand_in))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True))
        stack.enter_context(inductor_config.patch({"fx_graph_cache": False, "compile_threads": 1, "triton.autotune_at_compile_time": False, **options}))
        stack.enter_context(FakeTensorMode())
        cfg = load_config({"RECIPE": "pr549", "DATA_PATH": "nowhere"})
        model = model_module.Golf(cfg, model_layout(cfg, world), torch.bfloat16, "cuda", kernels=words - {"plain"})
        ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64, device="cuda")
        try:
            torch.compile(training_loss(model, model.cap), fullgraph=True, dynamic=False)(ids, ids)
        except Exception:
            if len(codes) < 2:
                raise
    return codes


def asked_by(nodes) -> list:
    "The lines of golfnb behind the compiler's nodes, 'file:line function' each."
    frames = set()
    for n in nodes:
        for origin in getattr(getattr(n, "node", None), "origins", None) or ():
            if "view" not in origin.name:
                frames |= set(re.findall(r'golfnb/(\w+\.py)", line (\d+), in (\w+)', origin.meta.get("stack_trace") or "")[-1:])
    return sorted("{}:{} {}".format(*f) for f in frames)


KINDS = {"heads": "chapter 07", "xsa": "chapter 07", "mlp": "chapter 07", "aten._scaled_dot": "attention", "extern_kernels": "product", "copy_": "copy", "zero_": "fill"}
Launch = collections.namedtuple("Launch", "way kind name gb origins")


def launches_of(way: str, made: dict, code: str) -> list:
    "Every launch of one wrapper, in order."
    found = []
    for line in code[code.index("def call("):].splitlines():
        line = line.strip()
        if line.startswith("#") or "assert_" in line:
            continue
        if m := re.match(r"(triton_\w+)\.run\(", line):
            found.append(Launch(way, "generated", m[1], *made[m[1]].pop(0)))
        elif m := re.search(r"torch\.ops\.(?:golfnb\.(\w+)|(aten\.\w+))|(extern_kernels)\.(\w+)", line):
            word = m[1] or m[2] or m[3]
            kind = next((k for w, k in KINDS.items() if word.startswith(w)), "other")
            found.append(Launch(way, kind, m[4] or word, 0.0, []))
        elif ".sum(dim=0)" in line:
            found.append(Launch(way, "sum of parts", "aten sum", 0.0, []))
            if ".to(" in line:
                found.append(Launch(way, "cast of a sum", "aten to", 0.0, []))
        elif m := re.search(r"\.(copy_|zero_|fill_)\(", line):
            found.append(Launch(way, KINDS.get(m[1], "fill"), m[1], 0.0, []))
    return found


SMALL = 0.02  # GB


def show(launches: list, every: bool):
    "Print the launches, and the small ones by what asked for them."
    if every:
        for i, x in enumerate(launches):
            print(f"{i:4d} {x.way:8s} {x.kind:13s} {1e3 * x.gb:9.2f} MB  {x.name[:60]:60s} {'; '.join(x.origins)[:200]}")
    print(len(launches), "launches:", ", ".join(f"{n} {kind} {way}" for (way, kind), n in sorted(collections.Counter((x.way, x.kind) for x in launches).items())))
    small = [x for x in launches if x.kind == "generated" and x.gb < SMALL]
    print(f"{sum(x.gb for x in launches):.2f} GB by {sum(x.kind == 'generated' for x in launches)} generated kernels, of which {len(small)} move less than {1e3 * SMALL:.0f} MB:")
    groups = collections.defaultdict(list)
    for x in small:
        groups[x.way, re.sub(r"_\d+$", "", x.name), "; ".join(sorted({re.sub(r":\d+", "", o) for o in x.origins}))].append(x.gb)
    for (way, name, origins), gb in sorted(groups.items(), key=lambda kv: -len(kv[1])):
        print(f"{len(gb):4d} x {way:8s} {1e3 * sum(gb):8.2f} MB  {name[:70]:70s} {origins[:150]}")


def record(name: str, launches: list):
    "Add the counts of one variant to nbs/results/launches_codegen.json."
    from golfnb.bench import read_result, record_result
    from golfnb.settings import GolfError
    try:
        samples = read_result("launches_codegen")["samples"]
    except GolfError:
        samples = {}
    of = lambda *kinds: [x for x in launches if x.kind in kinds]
    samples |= {f"{name}: launches": [len(launches)], f"{name}: generated kernels": [len(of("generated"))], f"{name}: of them under 20 MB": [sum(x.gb < SMALL for x in of("generated"))],
                f"{name}: sums of parts and their casts": [len(of("sum of parts", "cast of a sum"))], f"{name}: GB moved by generated kernels": [sum(x.gb for x in launches)]}
    record_result("launches_codegen", samples, "as each series says", f"Launches of forward and backward in the code that the compiler writes for recipe pr549, {ROWS}x{TOKENS} tokens, one Hopper card; "
                  "tests/study_launches.py, nothing was run; what cuBLAS and cuDNN launch inside a call is not counted")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("words", nargs="?", default="heads+xsa+fold+mlp", help="kernels that are switched on, joined by +")
    p.add_argument("--world", type=int, default=1, help="ranks that share the banks")
    p.add_argument("--all", action="store_true", help="print every launch in order")
    p.add_argument("--save", default="", help="folder for the wrapper code")
    p.add_argument("--option", action="append", default=[], help="of the compiler, name=value")
    p.add_argument("--record", default="", help="name of this variant in nbs/results/launches_codegen.json")
    a = p.parse_args()
    launches, options = [], {k: ast.literal_eval(v) for k, v in (o.split("=") for o in a.option)}
    for (code, made), way in zip(generated(set(a.words.split("+")), options, a.world), ("forward", "backward")):
        launches += launches_of(way, made, code)
        if a.save:
            Path(a.save).mkdir(exist_ok=True, parents=True)
            (Path(a.save) / f"{way}.py").write_text(code)
    show(launches, a.all)
    if a.record:
        record(a.record, launches)
