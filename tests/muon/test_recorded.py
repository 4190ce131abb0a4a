"""The step that records itself: what is sent before a replay, when there is one, streams, and Newton-Schulz in lent memory; on a GPU see test_optimizer."""
import os
import subprocess
import sys

import pytest
import torch

from golfnb.muon.jit import triton
from golfnb.muon.multi_tensor import RECORDING, Kept, Upload, at_rest, current_upload, live_numbers, numbers_of, on_device
from golfnb.muon.newton_schulz import newton_schulz
from golfnb.muon.recorded import STREAMS, Recorder, SharedRecorder, drop_all, lent_direction, multiplies_as_usual, on_streams, orthogonalized_in_place, share_out, spare_elements
from golfnb.muon.rules import AdamWRule, MuonEqRule, MuonRule, NorMuonRule

CPU = torch.device("cpu")
GROUP = {"ns_coefficients": "quintic", "ns_steps": 5, "eps": 1e-7}


def test_an_upload_sends_numbers_as_they_are_and_addresses_that_move():
    there = [torch.zeros(40), torch.zeros(8, dtype=torch.bfloat16), torch.zeros(3, 5)]
    begins = [t.data_ptr() for t in there]
    upload, group = Upload(CPU, there), {"lr": 0.1, "momentum": torch.tensor(0.5)}
    tables = [torch.tensor([[begins[0], begins[2] + 8, 7], [1, 2, 3]]), torch.tensor([begins[1] - 1, begins[1] + 15, begins[1] + 16])]
    places = [upload.keep(table) for table in tables]
    numbers = [upload.numbers(lambda: [group["lr"]]), upload.numbers(lambda: [2.5, group["momentum"], group["lr"]])]
    upload.finish()
    upload.send(begins)
    assert all(map(torch.equal, places, tables)) and [n.tolist() for n in numbers] == [[0.1], [2.5, 0.5, 0.1]]
    group.update(lr=0.2, momentum=torch.tensor(0.25))
    upload.send([1000, 2000, 3000])
    assert places[0].tolist() == [[1000, 3008, 7], [1, 2, 3]] and [n.tolist() for n in numbers] == [[0.2], [2.5, 0.25, 0.2]]
    assert places[1].tolist() == [begins[1] - 1, 2015, begins[1] + 16], "a byte before, inside, and a byte behind"
    assert all(place.data_ptr() % 16 == upload.there.data_ptr() % 16 for place in (*places, *numbers))


def test_an_upload_has_an_end():
    upload = Upload(CPU, [torch.zeros(1)])
    for take in (lambda: upload.keep(torch.zeros(upload.places[1], dtype=torch.int64)), lambda: upload.numbers(lambda: [0.0] * (upload.places[0] + 2))):
        with pytest.raises(RuntimeError, match="too large"):
            take()


def test_numbers_and_plain_loops_know_of_a_recording():
    group, grads = {"lr": 0.1, "betas": (0.5, 0.75), "eps": 1e-7}, [torch.ones(2, 3)]
    assert live_numbers(group, CPU) is group and at_rest(grads) is grads
    assert current_upload() is None and numbers_of(lambda: [1.0, torch.tensor(2)], CPU).tolist() == [1.0, 2.0]
    RECORDING.upload = upload = Upload(CPU, [torch.zeros(1)])
    try:
        assert numbers_of(lambda: [1.0], CPU).data_ptr() == upload.there.data_ptr()
        assert on_device(torch.ones(2), CPU).tolist() == [1.0, 1.0]
        live = live_numbers(group, CPU)
        assert live["lr"].data_ptr() >= upload.there.data_ptr() and [b.tolist() for b in live["betas"]] == [0.0, 0.0] and live["eps"] == 1e-7
        with pytest.raises(RuntimeError, match="kernels"):
            at_rest(grads)
    finally:
        RECORDING.upload = None


class Fake(Recorder):
    "Notes what happens instead."
    fails = False

    def __init__(self):
        super().__init__(CPU)
        self.notes = []

    def record(self, moving, function):
        if self.fails:
            raise RuntimeError("no")
        self.notes.append("record")
        notes = self.notes

        class Replayed:
            def replay(self, moving):
                notes.append("replay")
        return Replayed()

    def take(self, keys):
        self.notes.clear()
        for key in keys:
            self.call(key, [], lambda: self.notes.append("call"))
        return [self.notes.count(what) for what in ("call", "record", "replay")]


def test_a_step_is_replayed_after_a_few_alike(monkeypatch, caplog):
    monkeypatch.setattr("golfnb.muon.recorded.leave_capture", lambda device: None)
    recorder = Fake()
    assert recorder.take([None] * 9) == [9, 0, 0]
    assert recorder.take([["a"]] * 9) == [3, 1, 6]
    assert recorder.take([["b"], ["a"], None] * 3) == [6, 0, 3]
    assert recorder.take([["b"]] * 9) == [3, 1, 6], "the second waits twice as long, three calls of it before"
    assert recorder.take([["a"], ["b"]] * 2) == [0, 0, 4], "both are kept"
    assert recorder.take([["c"]] * 20) == [12, 1, 8]
    assert recorder.take([["a"], ["c"], ["b"]]) == [1, 0, 2], "two are kept"
    recorder.fails = True
    assert not caplog.records
    assert recorder.take([["d"]] * 50) == [50, 0, 0] and not recorder.works
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert recorder.take([["b"]]) == [0, 0, 1], "what was recorded stays right"


def test_numbers_that_stay_are_not_sent_again_and_what_is_missing_is_at_0():
    there = torch.zeros(4, 4)
    upload, group = Upload(CPU, [there]), {"lr": 0.1}
    place, number = upload.keep(torch.tensor([there.data_ptr(), there.data_ptr() + 16, 3])), upload.numbers(lambda: [group["lr"]])
    upload.finish()
    upload.send([500])
    assert place.tolist() == [500, 516, 3]
    place.zero_()
    upload.send([500])
    assert place.tolist() == [0, 0, 0], "nothing has changed"
    upload.send([0])
    assert place.tolist() == [0, 0, 3] and number.tolist() == [0.1]


def test_tables_are_made_again_where_an_address_has_changed():
    kept, made = Kept(), []
    for key in (1, 1, 2, 2, 1):
        kept.look_up([key], lambda: made.append(key) or key)
    assert made == [1, 2, 1]
    for values in ([0.1, 2.0], [0.1, 3.0], [0.5, 3.0]):
        place = kept.numbers(values, CPU)
        assert place.tolist() == values
    assert kept.numbers([1.0], CPU).tolist() == [1.0]


class Agreed(SharedRecorder):
    "One of several ranks whose words are known; notes what happens instead."

    def __init__(self, others=("", "", "")):
        super().__init__(CPU, 0, lambda words: [words, *([""] if words == "new" else [self.others.pop(0)] if self.others else [""])])
        self.others, self.notes = list(others), []

    def record(self, moving, function):
        self.notes.append("record")
        notes = self.notes

        class Replayed:
            graph = type("Graph", (), {"reset": lambda self: notes.append("reset")})()

            def replay(self, moving):
                notes.append("replay")
        return Replayed()

    def walk(self, keys, reason=""):
        self.notes.clear()
        for key in keys:
            self.take([key], [torch.zeros(1)], lambda: self.notes.append("call"), reason)
        return [self.notes.count(what) for what in ("call", "record", "replay")]


def test_all_ranks_record_the_same_step_or_none(caplog):
    caplog.set_level("INFO", "golfnb")
    assert Agreed().walk("aaaaaaaaa") == [3, 1, 6]
    slow = Agreed(["its gradient is missing", "", ""])
    assert slow.walk("aaaaaaaaa") == [7, 1, 2], "asked again at the eighth step"
    assert "rank 1: its gradient is missing" in caplog.text
    assert Agreed(["", "no room"]).walk("a" * 40) == [40, 1, 0], "a rank that fails: none"
    assert "not recorded" in caplog.text and "rank 1: no room" in caplog.text
    one = Agreed([])
    assert one.walk("abababab") == [8, 0, 0] and "were not alike" in caplog.text
    assert one.walk("cccccccc") == [7, 1, 1] and one.walk("dc") == [1, 0, 1]
    assert one.walk("ee", "it may do more") == [2, 0, 0] and one.notes[-1] == "call"
    drop_all()
    assert not one.recordings and one.notes[-1] == "reset" and one.walk("c" * 40) == [40, 0, 0]


def test_a_recording_that_fails_here_is_told_to_the_others(caplog, monkeypatch):
    said = []

    class Failing(Agreed):
        def record(self, moving, function):
            raise RuntimeError("no room")
    recorder = Failing()
    monkeypatch.setattr("golfnb.muon.recorded.leave_capture", lambda device: recorder.notes.append("leave"))
    recorder.ask_all = lambda words: said.append(words) or [words, ""]
    assert recorder.walk("aaaaaaaaa") == [9, 0, 0] and recorder.notes.count("leave") == 1 and not recorder.works
    assert said == ["", "new", "no room"] and [record.levelname for record in caplog.records] == ["WARNING"]


def test_work_is_shared_out_and_all_is_done():
    for costs in ([], [5], [3, 3, 2, 2, 2], list(range(20))):
        shares = share_out(costs)
        assert len(shares) == STREAMS and sorted(i for share in shares for i in share) == list(range(len(costs)))
    assert max(sum(share) for share in share_out(list(range(20)))) <= 190 / STREAMS + 19
    with on_streams(CPU) as streams:
        assert streams == [None] * STREAMS


@pytest.mark.parametrize("shape", [(3, 6, 4), (2, 5, 9), (1, 7, 7)])
def test_lent_memory_gives_the_same(shape):
    stack = torch.randn(shape)
    made = orthogonalized_in_place(stack.clone(), torch.empty(spare_elements(*shape)), GROUP)
    assert torch.equal(made, newton_schulz(stack))


class Halves(MuonRule):
    "One of one's own: half of a stack is made orthogonal, and twice the result is a direction."
    def before(self, stack, group):
        return stack / 2

    def after(self, made, state, group, ok):
        return made * 2


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rule", [MuonRule(), NorMuonRule(), MuonEqRule(), Halves()], ids=lambda rule: type(rule).__name__)
def test_directions_in_lent_memory_are_the_rules_own(rule, transposed):
    group, shape, found = {**rule.defaults, "transposed": transposed}, (3, 6, 4), []
    for lend in (False, True):
        torch.manual_seed(0)
        state = {name: torch.rand(3, *of_one) for name, of_one in rule.matrix_state(6, 4, group).items()}
        stack, ok = torch.randn(shape), torch.tensor([True, False, True]).view(-1, 1, 1)
        assert multiplies_as_usual(rule)
        made = lent_direction(rule, stack, torch.empty(spare_elements(*shape)), state, group, ok) if lend else rule.direction(stack, state, group, ok)
        found.append([made, *state.values()])
    assert all(map(torch.equal, *found))


def test_a_direction_of_ones_own_gets_no_lent_memory():
    class Own(MuonRule):
        def direction(self, stack, state, group, ok):
            return stack

    assert not multiplies_as_usual(Own()) and not multiplies_as_usual(AdamWRule())


INTERPRETED = """
import torch
from golfnb.muon.newton_schulz import NS5_COEFFS, newton_schulz
from golfnb.muon.recorded import full_product, lent_steps, norms_of, spare_elements
torch.manual_seed(0)
for n, M, K, tile in ((2, 64, 128, (64, 128)), (1, 128, 192, (64, 128)), (2, 128, 320, (128, 256))):
    s = torch.randn(n, M, M)
    s = s + s.mT
    for x in (torch.randn(n, M, K), torch.randn(n, K, M).mT):
        out = torch.empty(n, M, K)
        full_product(s, x, out, *tile, 4)
        torch.testing.assert_close(out, s @ x, rtol=1e-4, atol=1e-3)
for shape in ((2, 64, 64), (2, 64, 192), (1, 192, 64), (1, 128, 256)):
    stack = torch.randn(shape)
    X = stack.mT if shape[1] > shape[2] else stack
    made = lent_steps(X.clone(memory_format=torch.preserve_format), torch.empty(spare_elements(*shape)), NS5_COEFFS, 1.0, 1e-7)
    want = newton_schulz(stack.double())
    assert float((made - (want.mT if X is not stack else want)).norm() / want.norm()) < 1e-4, shape
X = torch.randn(3, 96, 64)
torch.testing.assert_close(norms_of(X @ X.mT, 1.5, 0.25), X.flatten(1).norm(dim=1) * 1.5 + 0.25)
print("equal")
"""


@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_interpreted_products_equal_torchs():
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "equal" in done.stdout, done.stderr[-3000:]
