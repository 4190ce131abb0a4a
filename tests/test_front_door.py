"""`import golfnb` offers what a user needs, and loads nothing heavy before it is asked."""
import subprocess
import sys
from pathlib import Path

import golfnb
import pytest


@pytest.mark.parametrize("name", golfnb.__all__)
def test_a_name_of_the_front_door_says_what_it_is(name):
    assert name in dir(golfnb) and getattr(golfnb, name).__doc__ and getattr(golfnb, name).__module__.startswith("golfnb.")


def test_the_front_door_is_light_and_hides_no_module():
    code = "import sys, golfnb; assert 'golfnb.settings' not in sys.modules and 'torch' not in sys.modules; from golfnb import *; assert Golf and 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not {p.stem for p in Path(golfnb.__file__).parent.glob("*.py")} & set(golfnb.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Muon'"):
        golfnb.Muon
