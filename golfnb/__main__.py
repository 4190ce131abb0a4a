"`python -m golfnb` is the command `golfnb`."
from golfnb.tools.cli import main_process

main_process()
