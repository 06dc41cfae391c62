"""Every task, thread and callback has a rule for its unexpected end, so that nothing that dies goes unnoticed.

Nobody read the exception of the supervisor's task, so an engine that could not be started once was never started
again. The places that start something are found in the sources. A new one needs a line here.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import syntax_trees

ROOT = Path(__file__).parents[2]
ROOMS = (
    ROOT / "core" / "tinsmith",
    *sorted(ROOT.glob("libraries/*/tinsmith_*/")),
    *sorted(ROOT.glob("plugins/*/tinsmith_*/")),
)

STARTS: Final = frozenset(
    {
        "alongside",
        "add_done_callback",
        "call_at",
        "call_later",
        "create_task",
        "ensure_future",
        "lasting",
        "ProcessPoolExecutor",
        "run_coroutine_threadsafe",
        "run_in_executor",
        "start_lasting",
        "start_new_thread",
        "TaskGroup",
        "Thread",
        "ThreadPoolExecutor",
        "Timer",
    }
)

LASTING = "logged, and it starts again (tinsmith.lasting)"
AWAITED = "whoever started it waits for it, and gets its exception"
ENGINE = "it is in the engine's group: the engine ends with the exception"
PROCESS = "it ends its process, which is watched"
PENDING = "all who wait for it get the exception"
CALLBACK = "it changes fields and wakes waiters; the task that it follows has a rule of its own"
LOGGED = "logged; what it did is worth no more"

RULES: Mapping[str, str] = {
    "tinsmith.builtin.metrics_endpoint:_Page.text": PENDING,
    "tinsmith.commands.replay:Replay._backend": AWAITED,
    "tinsmith.commands.replay:Replay._rebuilt": AWAITED,
    "tinsmith.commands.replay:_to_its_end": AWAITED,
    "tinsmith.engine.backend_calls:TrainingThread.__init__": AWAITED,
    "tinsmith.engine.backend_calls:TrainingThread.call": AWAITED,
    "tinsmith.engine.consistency_gate:ConsistencyGate.admit_for_now": ENGINE,
    "tinsmith.engine.context:EngineContext": ENGINE,
    "tinsmith.engine.device_turns:DeviceTurns._advance": PENDING,
    "tinsmith.engine.device_turns:_submitted": CALLBACK,
    "tinsmith.engine.device_turns:sleepers.in_thread": AWAITED,
    "tinsmith.engine.device_turns:submit_in_turn": AWAITED,
    "tinsmith.engine.engine:Engine.run": ENGINE,
    "tinsmith.engine.places:Places._move": ENGINE,
    "tinsmith.engine.probes:Probes._compared": AWAITED,
    "tinsmith.engine.probes:Scoring.begin": PENDING,
    "tinsmith.engine.recorder:Recorder._tell": CALLBACK,
    "tinsmith.engine.recovery_points:RecoveryPoints.take_due": ENGINE,
    "tinsmith.engine.sampling:Sampling._start": ENGINE,
    "tinsmith.engine.sampling:Sampling.run_alone": ENGINE,
    "tinsmith.engine.training:Training._step": ENGINE,
    "tinsmith.lasting:alongside": LASTING,
    "tinsmith.lasting:start_lasting": LASTING,
    "tinsmith.lifeline:end_with": PROCESS,
    "tinsmith.processes.engine_child:EngineChild.run": LASTING,
    "tinsmith.processes.engine_run:EngineRun._loaded": AWAITED,
    "tinsmith.processes.engine_run:EngineRun._run": AWAITED,
    "tinsmith.processes.engine_run:EngineRun._run_engine": LASTING,
    "tinsmith.processes.figure_reports:reporting": LASTING,
    "tinsmith.processes.lease:hold_lease": AWAITED,
    "tinsmith.processes.reports:EngineReports.running": LASTING,
    "tinsmith.processes.serve:_serve": LASTING,
    "tinsmith.processes.supervisor:Supervisor._run": LASTING,
    "tinsmith.processes.supervisor:Supervisor.start": LASTING,
    "tinsmith.processes.watchdog:Watchdog.running": "each look is logged if it fails, and it looks again",
    "tinsmith.server.kept:Reading.get": PENDING,
    "tinsmith.server.limits.bounded_http:Connections._check_again": "the next check is due whatever this one raises",
    "tinsmith.server.limits.bounded_http:Connections.admit": "as Connections._check_again",
    "tinsmith.server.limits.heavy_work:HeavyWork.__init__": AWAITED,
    "tinsmith.server.limits.heavy_work:HeavyWork.run_queued": AWAITED,
    "tinsmith.server.route_sampling:TenantSampling._cancel": LOGGED,
    "tinsmith.server.run_streams:RunStreams._listening": "logged; the streams of the run end, and readers ask again",
    "tinsmith.server.storage_health:StorageHealth._why_no_writes": PENDING,
    "tinsmith.sql_store.databases.database:Database.__init__": AWAITED,
    "tinsmith.sql_store.databases.database:Database._in_thread": AWAITED,
    "tinsmith.sql_store.databases.database:Database.run": AWAITED,
    "tinsmith.sql_store.databases.notify_wakeups:NotifyWakeUps.open": LASTING,
    "tinsmith.sql_store.group_commit:Grouping.open": LASTING,
    "tinsmith.sql_store.store:SqlStore.open": LASTING,
    "tinsmith.stopping:unless_stopped": AWAITED,
    "tinsmith_checkpoints.format:_each_described": AWAITED,
    "tinsmith_checkpoints.huggingface.hub_download:_fetch_all": AWAITED,
    "tinsmith_jax.adapters:from_canonical": AWAITED,
    "tinsmith_jax.compilation:Programs.start_warm_up": LOGGED,
    "tinsmith_jax.native.library:begin": AWAITED,
    "tinsmith_jax.native.library:compiled": AWAITED,
    "tinsmith_jax.sampler:Sampler._begin": PENDING,
    "tinsmith_jax.training_device:TrainingDevice.__init__": AWAITED,
    "tinsmith_openai.drawing:together": AWAITED,
    "tinsmith_openai.drawing:unless_gone": AWAITED,
    "tinsmith_openai.live_answers:LiveAnswer.__init__": PENDING,
    "tinsmith_openai.text_work:TextWork.__init__": AWAITED,
    "tinsmith_otel.tracer:OtelTracer.close": LOGGED,
    "tinsmith_vllm.child:main": PROCESS,
    "tinsmith_vllm.replica:Replica.__init__": PENDING,
    "tinsmith_vllm.replica:Replica._one_life": PROCESS,
    "tinsmith_vllm.worker:PreparedAdapters.prepare": PENDING,
    "tinsmith_workers.front_door:FrontDoor.__init__": "logged, and it lets in the next worker",
    "tinsmith_workers.front_door:FrontDoor._accept_one": "the connection closes, and the worker connects again",
    "tinsmith_workers.front_door:FrontDoor._greet": "closes a connection whether or not it is open",
    "tinsmith_workers.serving:_Serving.run": PROCESS,
    "tinsmith_workers.state_writer:StateWriter.begin": PENDING,
    "tinsmith_workers.usage:Usage.__init__": "each look is logged if it fails, and it looks again",
}
"""By module and function: what happens when something that it starts ends unexpectedly."""


def test_everything_that_is_started_has_a_rule() -> None:
    found = {place for room in ROOMS for file in room.rglob("*.py") for place in places(file, room)}
    assert found - RULES.keys() == set(), "say above what happens when it ends unexpectedly"
    assert RULES.keys() - found == set(), "they start nothing any more"


def places(file: Path, room: Path) -> Iterator[str]:
    """Yield the functions of a file that start a task, a thread, a timer or a callback, as "module:function".

    What `tinsmith.testing` starts is seen by the tests that use it.
    """
    module = ".".join(file.relative_to(room.parent).with_suffix("").parts)
    if module.startswith(("tinsmith.testing", "tinsmith_workers.testing")):
        return
    for name, node in named(syntax_trees.tree_of(file), ""):
        if starts(node):
            yield f"{module}:{name}"


def named(tree: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield all nodes, each with the name of the function around it."""
    for node in ast.iter_child_nodes(tree):
        own = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        here = ".".join(filter(None, (name, node.name))) if own else name
        yield here, node
        yield from named(node, here)


def starts(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return name in STARTS
        case ast.keyword(arg="default_factory", value=ast.Attribute(attr=name)):
            return name in STARTS
    return False


def test_what_is_started_is_found_wherever_it_stands(tmp_path: Path) -> None:
    source = """
    class A:
        group = field(default_factory=asyncio.TaskGroup)
        def b(self):
            def c(): threading.Thread(target=x).start()
            return loop.create_task(y)
        async def d(self): ThreadPoolExecutor(1)
    async def e():
        async with alongside(work, name="work"): ...
    def f(self, lasting): return self.submit(lasting)
    def g(thread: threading.Thread): return thread.is_alive()
    """
    file = tmp_path / "room" / "m.py"
    file.parent.mkdir()
    file.write_text(source.replace("\n    ", "\n"))
    assert set(places(file, file.parent)) == {f"room.m:{name}" for name in ("A", "A.b.c", "A.b", "A.d", "e")}
