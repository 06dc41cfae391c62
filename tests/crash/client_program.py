"""The client of a run in a process of its own: `client_program.py URL MODEL STEPS`. Its output is a connection.

It tells each step, and goes on when it gets an answer. Then it tells what it saw and saved, and gets another one.
"""

import os
import sys
from multiprocessing.connection import Connection

import scenario
import tinker

url, model, steps = sys.argv[1:]
connection = Connection(os.dup(1))
os.dup2(2, 1)
scenario.STEPS = int(steps)


def at_step(number: int) -> None:
    connection.send(number)
    connection.recv()


service = tinker.ServiceClient(base_url=url, api_key="tml-test")
connection.send(scenario.run(service, model, at_step))
connection.recv()
service.close("success").result(timeout=scenario.WAIT_S)
