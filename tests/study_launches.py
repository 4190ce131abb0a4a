"""Every launch of forward and backward, without a GPU: what the compiler writes for a Hopper card, in order, with the bytes it moves and the lines that asked for it.

    python tests/study_launches.py [heads+xsa+fold+mlp] [--all] [--save FOLDER] [--option combo_kernels=1]

The model's tensors are fakes that say they lie on `cuda`; the compiler stops where kernels would be built. What cuBLAS, cuDNN and a recorded graph
launch inside one call is not seen here: a product counts once, an attention call once.
"""
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
    "Load that before torch is imported, since torch asks once."
    folder, built = Path(importlib.util.find_spec("torch").origin).parent, Path(tempfile.mkdtemp()) / "card.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-std=c++20", f"-I{folder}/include", "-x", "c++", "-", "-o", built, f"-L{folder}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{folder}/lib"], input=CARD, text=True, check=True)
    ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)


plug_in()
import torch  # noqa: E402
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402


class Found(Exception):
    "The code that was wanted."


def hopper(stack):
    "Make torch believe in one Hopper card. `stack` undoes it."
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
    with OnCpu():
        return deduce(folder, node)


def cudnn_attend(q, k, v, choice="auto"):
    "`attend` as cuDNN's operator, which a torch without CUDA would not choose by itself."
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=q.shape[-1] ** -0.5)[0].transpose(1, 2)


def generated(words: set, options: dict, world: int) -> list:
    "The wrapper code of forward and of backward."
    import golfnb.model as model_module
    from torch._inductor import config as inductor_config
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode
    from golfnb.config import load_config
    from golfnb.kernels import KERNELS_ON
    from golfnb.layout import model_layout
    from golfnb.train import training_loss
    codes, made = [], collections.defaultdict(list)

    def noted(scheduling, source, nodes, kernel, define=TritonScheduling.define_kernel):
        name = define(scheduling, source, nodes, kernel)
        inner = [n for x in nodes for n in (x.get_nodes() if hasattr(x, "get_nodes") else [])]
        made[name].append((kernel.estimate_kernel_num_bytes() / 1e9 if hasattr(kernel, "estimate_kernel_num_bytes") else 0.0, asked_by(inner)))
        return name

    def stop(graph):
        made.clear()
        codes.append((graph.codegen()[0].value, dict(made)))
        if len(codes) == 2:
            raise Found
        return SimpleNamespace(call=lambda args: None, __file__="nothing", key="", cache_key="", cache_linemap=[], runner=None)
    with contextlib.ExitStack() as stack:
        hopper(stack)
        stack.enter_context(mock.patch.object(joint_graph, "lazy_init", lambda device: None))  # patterns (of attention, of padding) that it would try on the card
        stack.enter_context(mock.patch.object(UniformValueConstantFolder, "_deduce_value", folded_on_cpu))
        stack.enter_context(mock.patch.object(TritonScheduling, "define_kernel", noted))
        stack.enter_context(mock.patch.object(GraphLowering, "compile_to_module", stop))
        stack.enter_context(mock.patch.object(model_module, "attend", cudnn_attend))
        stack.enter_context(mock.patch.object(torch._functorch.config, "force_non_lazy_backward_lowering", True))
        stack.enter_context(inductor_config.patch({"fx_graph_cache": False, "compile_threads": 1, "triton.autotune_at_compile_time": False, "worker_suppress_logging": True, **options}))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        KERNELS_ON.clear()
        KERNELS_ON.update(words - {"plain"})
        cfg = load_config({"RECIPE": "pr549", "DATA_PATH": "nowhere"})
        stack.enter_context(FakeTensorMode())
        model = model_module.Golf(cfg, model_layout(cfg, world), torch.bfloat16, "cuda")
        ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64, device="cuda")
        try:
            torch.compile(training_loss(model, model.cap), fullgraph=True, dynamic=False)(ids, ids)
        except Exception as e:
            if len(codes) < 2:
                raise
    return codes


KINDS = {"heads": "chapter 07", "xsa": "chapter 07", "mlp": "chapter 07", "aten._scaled_dot": "attention", "extern_kernels": "product", "copy_": "copy", "zero_": "fill"}
Launch = collections.namedtuple("Launch", "way kind name gb origins")


def asked_by(nodes) -> list:
    "The lines of golfnb behind the compiler's nodes, 'file:line function' each."
    frames = set()
    for n in nodes:
        for origin in getattr(n.node, "origins", None) or () if getattr(n, "node", None) is not None else ():
            if "view" not in origin.name:
                frames |= set(re.findall(r'golfnb/(\w+\.py)", line (\d+), in (\w+)', origin.meta.get("stack_trace") or "")[-1:])
    return sorted("{}:{} {}".format(*f) for f in frames)


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


def show(launches: list, every: bool, small: float = 0.02):
    "Print the launches, and the small ones by what asked for them. `small` is in GB."
    if every:
        for i, x in enumerate(launches):
            print(f"{i:4d} {x.way:8s} {x.kind:13s} {1e3 * x.gb:9.2f} MB  {x.name[:60]:60s} {'; '.join(x.origins)[:200]}")
    count = collections.Counter((x.way, x.kind) for x in launches)
    print(len(launches), "launches:", ", ".join(f"{n} {kind} {way}" for (way, kind), n in sorted(count.items())))
    generated = [x for x in launches if x.kind == "generated"]
    print(f"{sum(x.gb for x in generated):.2f} GB by {len(generated)} generated kernels, of which {sum(x.gb < small for x in generated)} move less than {1e3 * small:.0f} MB:")
    asked = collections.Counter((x.way, re.sub(r"_\d+$", "", x.name), "; ".join(sorted({re.sub(r":\d+", "", o) for o in x.origins}))) for x in generated if x.gb < small)
    moved = {k: sum(x.gb for x in generated if (x.way, re.sub(r"_\d+$", "", x.name), "; ".join(sorted({re.sub(r":\d+", "", o) for o in x.origins}))) == k) for k in asked}
    for (way, name, origins), n in asked.most_common():
        print(f"{n:4d} x {way:8s} {1e3 * moved[way, name, origins]:8.2f} MB  {name[:70]:70s} {origins[:150]}")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("words", nargs="?", default="heads+xsa+fold+mlp", help="kernels that are switched on, joined by +")
    p.add_argument("--world", type=int, default=1, help="ranks that share the banks")
    p.add_argument("--all", action="store_true", help="print every launch in order")
    p.add_argument("--save", default="", help="folder for the wrapper code")
    p.add_argument("--option", action="append", default=[], help="of the compiler, name=value")
    a = p.parse_args()
    launches = []
    for (code, made), way in zip(generated(set(a.words.split("+")), {k: eval(v) for k, v in (o.split("=") for o in a.option)}, a.world), ("forward", "backward")):
        launches += launches_of(way, made, code)
        if a.save:
            Path(a.save).mkdir(exist_ok=True, parents=True)
            (Path(a.save) / f"{way}.py").write_text(code)
    show(launches, a.all)
