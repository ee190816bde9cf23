"""The program on cuda-bindings, as one test."""

import pathlib
import subprocess
import sys


def test_a_program_on_the_bindings_runs():
    program = pathlib.Path(__file__).with_name("bindings.py")
    subprocess.run([sys.executable, str(program)], check=True)
