"""The launcher: what ranks get, where their output goes, which failure is shown, and that nothing survives it.

Most tests call the launcher in a process from the harness' fork server, which has imported torch already.
"""

import os
import re
import socket
import threading

import pytest
from launching import launch_forked, launch_here, launch_node, start, write

from onecard import cli, launch
from onecard.launch._allocator import CHOSEN, JEMALLOC, KEEPS, allocator
from onecard.launch._explain import Ended
from onecard.launch._main import plan
from onecard.launch._options import LaunchError, Options, parse
from onecard.launch._screen import _PlainLog, plain_line
from onecard.testing import run_ranks

# What ranks get.


def test_arguments_environment_and_logs(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("ONECARD")]:
        monkeypatch.delenv(name)  # what the user sets stays; of the launcher's own nothing
    program = write(
        tmp_path,
        """
        import os, sys
        print(sys.argv, __name__, __file__, sys.path[0])
        print(" ".join(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")))
        print(*(name for name in os.environ if name.startswith("ONECARD")), file=sys.stderr)
        """,
    )
    arguments = ["--gpus", "x y", "-m", "$$a", "${local_rank}", "--", ""]
    [(status, output)] = run_ranks(launch_here, 1, tmp_path, ["--nproc_per_node", "2", program, *arguments])
    logs = [path.read_text() for path in sorted((tmp_path / "logs").iterdir())]
    assert status == 0 and output == logs[0]
    first = f"{['program.py', *arguments]} __main__ program.py {tmp_path.resolve()}\n"
    assert logs == [f"{first}0 0 2 1\n\n", f"{first}1 1 2 1\n\n"]


ALL_REDUCE = """
    import contextlib
    import os
    import torch
    import torch.distributed as dist

    def listening(pid):
        sockets = set()
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of listdir itself
                sockets.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        rows = [line.split() for name in ("tcp", "tcp6") for line in list(open(f"/proc/net/{name}"))[1:]]
        return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}

    dist.init_process_group("gloo")
    x = torch.ones(2)
    dist.all_reduce(x)
    print("sum", x.tolist())
    if os.path.exists("/proc/net/tcp"):
        print("listening at", *(listening("self") | listening(os.getppid())))
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.proof
def test_process_group_on_the_loopback_interface_only(tmp_path):
    with start(tmp_path, ALL_REDUCE, "--nproc_per_node", "2") as process:
        output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    loopback = "\nlistening at 0100007F" if os.path.exists("/proc/net/tcp") else ""
    assert output == f"sum [2.0, 2.0]{loopback}\n"
    assert (tmp_path / "logs" / "rank1.log").read_text() == output


def without_the_stores_end(text: str) -> str:
    """Less what torch itself says where the first node, with the store, has ended before it asked the store once more."""
    return re.sub(r"(?m)^.*\[W\S* \S+ TCPStore\.cpp:\d+\].*\n(?:.+\n)*\n?", "", text)


def test_what_torch_says_of_its_store_is_no_output_of_the_launchers():
    said = "[rank1]:[W1123 08:58:34.32 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed\nException raised\nframe #0: a\n\n"
    assert without_the_stores_end(said) == "" and without_the_stores_end(f"{said}ours\n") == "ours\n"


@pytest.mark.proof
def test_two_machines(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = write(tmp_path, ALL_REDUCE)
    options = ["--nnodes", "2", "--master", f"127.0.0.1:{port}", program]
    (status0, output0), (status1, output1) = run_ranks(launch_node, 2, tmp_path, options)
    assert (status0, status1) == (0, 0)
    assert output0.startswith("sum [2.0, 2.0]\n") and without_the_stores_end(output1) == ""
    assert (tmp_path / "logs" / "rank1.log").read_text().startswith("sum [2.0, 2.0]\n")


@pytest.mark.proof
def test_module_form_and_main_is_a_real_main(tmp_path):
    write(
        tmp_path,
        """
        import multiprocessing, sys

        def square(x):
            return x * x

        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            with context.Pool(1) as pool:  # its process finds `square` in this file
                print(sys.argv[1:], pool.map(square, [3]))
        """,
    )
    [(status, output)] = run_ranks(launch_here, 1, tmp_path, ["-m", "program", "-m"])
    assert (status, output) == (0, "['-m'] [9]\n")
    [(status, output)] = run_ranks(launch_here, 1, tmp_path, ["program.py", "-m"])
    assert (status, output) == (0, "['-m'] [9]\n")


def test_a_terminal_stays_one_and_its_log_is_plain(tmp_path):
    program = write(
        tmp_path,
        r"""
        import sys
        print("\rstep 1\rstep 2", sys.stdout.isatty())
        print("\x1b[32mgreen\x1b[0m", file=sys.stderr)
        """,
    )
    [(status, output)] = run_ranks(launch_here, 1, tmp_path, [program], True)
    assert status == 0 and "\x1b[32mgreen" in output and "step 1" in output
    assert (tmp_path / "logs" / "rank0.log").read_text() == "step 2 True\ngreen\n"


@pytest.mark.proof
def test_a_reader_that_has_seen_enough_does_not_stop_the_rank(tmp_path):
    program = "for i in range(50_000): print('line', i)"
    with start(tmp_path, program) as process:
        process.stdout.close()
        assert process.wait(timeout=120) == 0
    assert (tmp_path / "logs" / "rank0.log").read_text().endswith("line 49999\n")


def test_log_of_a_line_that_is_drawn_in_pieces(tmp_path):
    file = (tmp_path / "log").open("wb")
    log = _PlainLog(file, threading.Lock())
    for piece in (b"\r10", b" %\r20 %\x1b[", b"0m\r", b"\r", b"30 %\r\nnext\nlast"):
        log.write(piece)
    log.close()
    file.close()
    assert (tmp_path / "log").read_text() == "30 %\nnext\nlast\n"
    assert plain_line(b"a\rb\r\r") == b"b" and plain_line(b"\r") == b""


# What fails.


@pytest.mark.proof
def test_the_first_failure_is_shown_last(tmp_path):
    program = write(
        tmp_path,
        """
        import torch
        import torch.distributed as dist

        def step():
            if dist.get_rank() == 1:
                raise ValueError("the root cause")
            dist.all_reduce(torch.ones(1))

        dist.init_process_group("gloo")
        print("started")
        step()
        """,
    )
    [(status, output)] = run_ranks(launch_here, 1, tmp_path, ["--nproc_per_node", "3", "--log_dir", "deep/er", program])
    assert status == 1
    told = output[output.index("onecard: ") :]
    assert told.startswith("onecard: rank 1 failed first, with exit code 1; its log is deep/er/rank1.log\n\nTraceback")
    assert told.endswith("ValueError: the root cause\n") and told.count("Traceback") == 1
    assert "in step" in told and "_worker.py" not in told and "runpy" not in told
    logged = (tmp_path / "deep/er/rank1.log").read_text().replace("[rank1]: ", "")  # torch's prefix
    assert told.rstrip().endswith(logged.partition("started\n")[2].rstrip())


@pytest.mark.share(1)
@pytest.mark.parametrize(
    ("act", "status", "says"),
    [
        ("sys.exit(7)", 7, "rank 1 ended first, with exit code 7; its log is logs/rank1.log\n\nThe end of its log:\nI"),
        ("os._exit(3)", 3, "rank 1 ended first, with exit code 3"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            "rank 1 was killed by SIGKILL",
        ),
        ("exec('1 +')", 1, "SyntaxError: invalid syntax"),
    ],
)
def test_how_a_rank_ended(tmp_path, act, status, says):
    program = write(
        tmp_path,
        f"""
        import os, signal, sys, time
        print("I am", os.environ["RANK"])
        if os.environ["RANK"] == "1":
            {act}
        time.sleep(60)
        """,
    )
    [(got, output)] = run_ranks(launch_here, 1, tmp_path, ["--gpus", "0,1", program])
    assert got == status and says in output


def test_restarts(tmp_path):
    program = write(
        tmp_path,
        """
        import os, pathlib, sys, time
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("attempt", attempt)
        pathlib.Path(f"attempt{attempt}rank" + os.environ["RANK"]).touch()
        while len(list(pathlib.Path().glob(f"attempt{attempt}rank?"))) < 2:  # the first to fail ends the other
            time.sleep(0.01)
        sys.exit(attempt == "0")
        """,
    )
    [(status, output)] = run_ranks(launch_here, 1, tmp_path, ["--nproc_per_node=2", "--max_restarts", "2", program])
    expected = "attempt 0\n--- restart 1 of 2 ---\nattempt 1\n"
    assert (status, output) == (0, expected)
    assert [path.read_text() for path in sorted((tmp_path / "logs").iterdir())] == [expected, expected]


# The command line.


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["no_such.py"], "no_such.py does not exist; looked in "),
        (["json"], r"json does not exist; .*\(for a module write: onecard run -m json\)"),
        (["."], "is a folder"),
        ([], "no script to run"),
        (["-m"], "name of a module"),
        (["-m", "no.such.module"], "no module no.such.module"),
        (["--nproc_per_node", "0", "program.py"], "at least one rank"),
        (
            ["--nproc_per_node", "two", "program.py"],
            "is 'two'; write a number: onecard run --nproc_per_node 2 script.py",
        ),
        (["--nproc-per-node=gpu", "program.py"], "one rank for each GPU"),
        (["--nnodes", "1:2", "program.py"], "--nnodes is '1:2'; write a number"),
        (["--gpus", "0,0", "program.py"], "different numbers"),
        (["--gpus", "all", "program.py"], "write different numbers"),
        (["--gpus", "0,1", "--nproc_per_node", "3", "program.py"], "only one of the two"),
        (["--nnodes", "2", "program.py"], "add --master"),
        (["--nnodes", "2", "--node_rank", "2", "program.py"], "--node_rank is 2"),
        (["--master", "node0", "program.py"], "write HOST:PORT"),
        (["--max_restarts", "-1", "program.py"], "max_restarts"),
    ],
)
def test_wrong_command_lines(argv, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "raise SystemExit(1)")
    with pytest.raises(LaunchError, match=says):
        parse(argv)
    assert launch.main(argv) == 2 and capsys.readouterr().err.startswith("onecard: ")
    assert not (tmp_path / "logs").exists()


def test_ranks_that_are_asked_for_behind_the_script_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "")
    monkeypatch.setattr("onecard.launch._main.run", lambda *_: (Ended(0), 0))
    assert launch.main(["program.py", "--lr", "1", "--nproc_per_node", "2"]) == 0
    assert "1 rank starts: onecard run --nproc_per_node 2 program.py" in capsys.readouterr().err
    assert launch.main(["--nproc_per_node", "1", "program.py", "--nproc_per_node=2"]) == 0  # the script's, surely
    assert capsys.readouterr().err == ""


def test_names_of_options(tmp_path):
    program = str(tmp_path / write(tmp_path, ""))
    for name in ("--gpus", "--devices", "--device"):
        assert parse([name, "2,3", program])[0].gpus == parse([f"{name}=2,3", program])[0].gpus == "2,3"
    assert parse(["--nproc-per-node", "4", program])[0].nproc_per_node == 4
    with pytest.raises(
        LaunchError, match=r"no option --zero: it is a plan.s\. onecard plan train.py .* --fixed zero=VALUE"
    ):
        parse(["--nproc_per_node", "2", "--zero", "3", "train.py"])
    with pytest.raises(LaunchError, match=r"there is no option --no_such_option\. All of them: onecard run --help"):
        parse(["--no_such_option", "4", program])
    for name in ("-n", "-np", "--nprocs", "--num_processes", "--nprco_per_node"):
        with pytest.raises(LaunchError, match=f"there is no option {name}; did you mean --nproc_per_node N?"):
            parse([name, "4", program])


def test_an_address_that_is_not_ours(tmp_path):
    program = write(tmp_path, "")
    [(status, output)] = run_ranks(launch_here, 1, tmp_path, ["--master", "192.0.2.1:29500", program])
    assert status == 2 and "onecard: cannot listen at 192.0.2.1:29500" in output


def test_a_log_dir_that_is_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").write_text("")
    assert launch.main([write(tmp_path, "")]) == 2 and "logs" in capsys.readouterr().err


def test_plan(monkeypatch, capsys):
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    nproc, environment = plan(Options())
    assert nproc == 1 and int(environment["OMP_NUM_THREADS"]) >= 1 and environment["GLOO_SOCKET_IFNAME"][:2] == "lo"
    assert plan(Options(gpus="0,1,2"))[0] == 3
    assert "no GPU here: --gpus 0,1,2 starts 3 ranks on the CPU" in capsys.readouterr().err
    assert "GLOO_SOCKET_IFNAME" not in plan(Options(nnodes=2, master="node0:29500"))[1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "OMP_NUM_THREADS" not in plan(Options())[1]

    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    nproc, environment = plan(Options())
    assert nproc == 4 and "CUDA_VISIBLE_DEVICES" not in environment
    assert plan(Options(gpus="2,1"))[1]["CUDA_VISIBLE_DEVICES"] == "2,1"
    with pytest.raises(LaunchError, match="there are 4, numbered from 0"):
        plan(Options(gpus="4"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    assert plan(Options(gpus="0,2"))[1]["CUDA_VISIBLE_DEVICES"] == "7,3"


def test_cli(capsys):
    assert cli.main(["--help"]) == 0 and "run a training script" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0 and capsys.readouterr().out.startswith("onecard ")
    assert cli.main(["walk"]) == 2 and "no command 'walk'" in capsys.readouterr().err
    assert cli.main([]) == 2
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert end.value.code == 0 and "one for each GPU, or 1 if there is none" in text


def test_the_allocator_is_set_unless_the_user_has(tmp_path, monkeypatch):
    for name in CHOSEN:
        monkeypatch.delenv(name, raising=False)
    assert allocator({}, [tmp_path]) == KEEPS
    assert plan(Options())[1].items() >= allocator({}).items()
    for name in CHOSEN:
        assert allocator({name: ""}, [tmp_path]) == {}
    (tmp_path / "libjemalloc.so.2").touch()
    assert allocator({}, [tmp_path]) == {"LD_PRELOAD": str(tmp_path / "libjemalloc.so.2"), "MALLOC_CONF": JEMALLOC}
    (tmp_path / "libtcmalloc.so.4").touch()
    assert allocator({}, [tmp_path]) == {"LD_PRELOAD": str(tmp_path / "libtcmalloc.so.4")}
    monkeypatch.setenv("LD_PRELOAD", "")
    assert "MALLOC_MMAP_MAX_" not in plan(Options())[1]


EXPLAINED = """
    import torch
    import onecard as oc

    mesh = oc.ProcessMesh([0, 1], ["dp"])
    model = oc.shard_layer(torch.nn.Linear(8, 4), mesh)
    optimizer = oc.shard_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    for step in range(4):
        loss = model(oc.shard_tensor(torch.ones(8, 8), mesh, [oc.Shard(0)])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 3:
            loss.item()
    print("done")
"""


def test_explain_tells_the_second_step_of_rank_0(tmp_path):
    argv = ["--explain", "--nproc_per_node", "2", write(tmp_path, EXPLAINED, "train.py")]
    [(status, said)] = run_ranks(launch_forked, 1, tmp_path, argv, {}, timeout=120)
    assert status == 0 and said.endswith("done\n")
    assert said.count("onecard run --explain: rank 0 of 2, its second step\n") == 1
    assert "train.py:12" in said and "all_reduce" in said and "sent 144 bytes" in said  # 36 numbers, once
    assert "train.py:14" not in said and "explain" not in (tmp_path / "logs" / "rank1.log").read_text()
    argv[-1] = write(tmp_path, "print('none')", "none.py")
    [(status, said)] = run_ranks(launch_forked, 1, tmp_path, argv, {}, timeout=120)
    assert status == 0 and "all that ran, which was not two steps: no message of onecard's" in said


APART = """
    import sys
    print("result")
    print("progress", file=sys.stderr)
    print("more")
"""


@pytest.mark.proof
def test_what_rank_0_says_to_standard_error_comes_out_there(tmp_path):
    with start(tmp_path, APART, "--nproc_per_node", "2") as process:
        output, errors = process.communicate(timeout=120)
    assert (process.returncode, output, errors) == (0, "result\nmore\n", "progress\n")
    logs = [(tmp_path / "logs" / f"rank{rank}.log").read_text() for rank in range(2)]
    assert sorted(logs[0].splitlines()) == ["more", "progress", "result"] and logs[1] == "result\nprogress\nmore\n"
