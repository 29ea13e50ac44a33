"""Worker processes without an actor: when they end, and who comes after them."""

import asyncio
from pathlib import Path

import psutil
import pytest

from tests.tasks.tools.tricky_tools import Tricky, ended, until
from torchtitan_rl.tasks.tools.calls import MOST_TRACEBACKS, Call
from torchtitan_rl.tasks.tools.workers import ProcessEndedError, Workers


@pytest.fixture(scope="module")
async def workers():
    workers = Workers(Tricky.Config(), seed=0)
    offers = await workers.start()
    assert offers["tricky"].answer == "sync"
    assert {name for name, waits in offers["tricky"].tools.items() if waits} == {"wait"}
    yield workers
    workers.close()


async def run(workers: Workers, tool: str, seconds: float = 20.0, **arguments):
    return await workers.run(Call("tricky", tool, {}, arguments), seconds)


async def process_of(workers: Workers) -> psutil.Process:
    """Process of the worker that will be taken next."""
    return psutil.Process(int((await run(workers, "where")).text.split(",")[0][1:]))


async def test_a_worker_is_used_again_until_it_fails(workers):
    first = await process_of(workers)
    assert await process_of(workers) == first
    with pytest.raises(TimeoutError):
        await run(workers, "hang", 0.2)
    assert await process_of(workers) != first
    await until(lambda: not first.is_running())


async def test_a_cancelled_call_ends_with_all_it_has_started(workers, tmp_path: Path):
    pid_file = tmp_path / "pids"
    call = asyncio.ensure_future(run(workers, "child", pid_file=str(pid_file)))
    await until(pid_file.exists)
    worker, child, server = (psutil.Process(int(pid)) for pid in pid_file.read_text().split())
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: ended(worker) and ended(child))
    assert server.is_running()
    assert (await run(workers, "add", a=1)).text == "2"


async def test_a_worker_that_died_idle_is_not_taken(workers):
    idle = await process_of(workers)
    idle.kill()
    await until(lambda: ended(idle))
    await asyncio.sleep(0.1)  # asyncio has to see it, too
    assert (await run(workers, "add", a=1)).text == "2"


async def test_a_fork_server_that_died_is_replaced(workers, tmp_path: Path):
    pid_file = tmp_path / "pids"
    hanging = asyncio.ensure_future(run(workers, "child", pid_file=str(pid_file)))
    await until(pid_file.exists)
    worker, child, server = (psutil.Process(int(pid)) for pid in pid_file.read_text().split())
    server.kill()
    with pytest.raises(ProcessEndedError):
        await hanging
    await until(lambda: ended(worker))
    child.kill()  # which only the server could have known
    assert (await run(workers, "add", a=1)).text == "2"


async def test_the_first_tracebacks_of_a_tool_are_logged(capfd):
    workers = Workers(Tricky.Config(), seed=0)
    await workers.start()
    for _ in range(MOST_TRACEBACKS + 2):
        result = await workers.run(Call("tricky", "fail", {}, {"message": "my bug"}), 30)
        assert result.outcome == "raised"
    workers.close()
    logged = capfd.readouterr().err
    assert "fail of task 'tricky'" in logged
    assert "in fail" in logged
    # One worker made all of them.
    assert logged.count("ValueError: my bug") == MOST_TRACEBACKS


async def test_a_task_that_cannot_be_built_says_why():
    before = psutil.Process().children()
    workers = Workers(Tricky.Config(broken=True), seed=0)
    with pytest.raises(RuntimeError, match="building the task raised KeyError: 'no data'"):
        await workers.start()
    assert psutil.Process().children() == before
