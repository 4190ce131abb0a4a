"""Hidden tests of lesson 8: the loop and the clock."""
from golfnb.tools.check import Score


class _World:
    "A clock that stands still but for steps and validations, and notes the shares that steps were given."

    def __init__(self, step_ms, validation_ms):
        self.now, self.step_ms, self.validation_ms, self.shares = 17.0, step_ms, validation_ms, []

    def clock(self):
        return self.now

    def step(self, share):
        assert len(self.shares) < 10_000, "training must end"
        self.shares.append(share)
        self.now += self.step_ms

    def validate(self):
        self.now += self.validation_ms


def bug(train_until):
    """
    1. Let validation take as long as four steps, and count the steps of a run with no, with one, and with many validations.
    2. After the second validation, what does `paused` hold of the first?
    3. Time that was not training adds up: add each validation's time to what was there before.
    """
    for step_ms, validation_ms in ((10.0, 0.0), (10.0, 40.0), (7.0, 100.0)):
        world = _World(step_ms, validation_ms)
        found = train_until(1000.0, 40, world.clock, world.step, world.validate)
        want = int(-(-1000.0 // step_ms))
        assert len(world.shares) == found, f"{found} steps were returned, {len(world.shares)} were taken"
        assert found == want, f"with steps of {step_ms:.0f} and validations of {validation_ms:.0f} the cap of 1000 must give {want} steps, found {found}"
        for n, share in enumerate(world.shares):
            right = min(1.0, (1000.0 - n * step_ms) / (40 * step_ms))
            assert abs(share - right) < 1e-9, f"step {n} must get {right:.3f} of the rate, found {share:.3f}"


def clock(steps, seconds):
    """
    1. Divide the time by the length of a step.
    2. The warmdown ends with the run. How long does it last, in seconds?
    3. Count back from the end of the run.
    """
    assert abs(steps / (600 / 0.084) - 1) < 0.005, f"{steps} steps is not it"
    assert abs(seconds / (600 - 3500 * 0.084) - 1) < 0.01, f"{seconds} s is not it"


def decay(decay, lag):
    """
    1. After n steps the initial weights count decay to the n.
    2. That must be a hundredth for n = 500: take the 500th root.
    3. The lag is decay over one minus decay.
    """
    want = 0.01 ** (1 / 500)
    assert abs(decay - want) < 2e-5, f"a decay of {decay} is not it"
    assert abs(lag / (want / (1 - want)) - 1) < 0.01, f"a lag of {lag} steps is not it"


def rates(rates):
    """
    1. Without noise, which rate is best for each curvature? And how much does noise leave at a rate that stays?
    2. Rates above 1 forget the flat directions fastest; the steep one is mended later, when the rate is low. When must the fall begin, and must it be a line?
    3. Write the loss as a function of 100 rates in torch and let an optimizer lower it: its gradient is exact.
    """
    values = [float(rate) for rate in rates]
    assert len(values) == 100, f"there must be 100 rates, found {len(values)}"
    assert all(0 <= rate <= 1.9 for rate in values), "each rate must lie between 0 and 1.9"
    curvatures = (1.0, 0.3, 0.1, 0.03, 0.01)
    squares = [1.0] * 5
    for rate in values:
        squares = [(1 - rate * h) ** 2 * e + rate ** 2 * h / 10 for h, e in zip(curvatures, squares, strict=True)]
    loss = sum(h * e for h, e in zip(curvatures, squares, strict=True))
    return Score(100 * loss / sum(curvatures), "%", 0.7017, 1.175)
