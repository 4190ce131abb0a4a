"`python -m golfnb` is the command `golfnb`."
import os
import sys

from golfnb.tools.cli import main_cli

status = main_cli()
sys.stdout.flush()
os._exit(status)  # a rank that failed and left in order could wait for the others
