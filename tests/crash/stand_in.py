"""Stands for an engine between its supervisor and the launcher: passes files and signals on, and dies as it dies."""

import os
import signal
import socket
import sys
from types import FrameType

connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
arguments = sys.argv[2:]
environ = [f"{name}={value}" for name, value in os.environ.items()]
message = "\0".join([str(len(arguments)), *arguments, *environ]).encode()
socket.send_fds(connection, [message], [0, 1, 2])
pid = int(connection.recv(64))


def pass_on(number: int, frame: FrameType | None) -> None:
    os.kill(pid, number)


for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, pass_on)
os.close(1)  # the supervisor reads until the engine itself has closed it
os.close(2)
status = os.waitstatus_to_exitcode(int(connection.recv(64) or 256))
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
