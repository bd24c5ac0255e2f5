"""The launch files start ranks on one host and on two, with the same results, and report what is missing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from mpi.launch import cannot
from two_hosts import Host, NotAllowed, two_hosts

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "scripts" / "launch"
TORCHRUN, MPIRUN, SLURM = (str(FOLDER / name) for name in ("torchrun.sh", "mpirun.sh", "slurm.sbatch"))
SMALL = str(ROOT / "tests" / "scripts" / "small_lesson.py")
# The command for two hosts and for one: a lesson and its options.
LESSONS = [("06-hybrid-parallelism/pytorch/hybrid_5d.py", "--pp", "2", "--ep", "2")]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the programs of this Python first on the PATH; two ranks per host."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("NPROC", "2")
    monkeypatch.chdir(ROOT)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts() as both:
            yield both
    except (NotAllowed, FileNotFoundError) as error:
        cannot(f"no networks can be made here: {error}")


def said(process: subprocess.Popen[str]) -> str:
    """Return the output of the process, which must end within 120 s."""
    try:
        return process.communicate(timeout=240)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"no end within 120 s: {process.args}", pytrace=False)


def on_this_host(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.name)
def test_a_launch_file_fits_a_page_and_says_what_to_change(file: Path) -> None:
    text = file.read_text()
    assert len(text.splitlines()) <= 60
    assert re.search("^# What to change", text, re.MULTILINE)
    if file.suffix != ".yaml":
        subprocess.run(["bash", "-n", str(file)], check=True)
        assert os.access(file, os.X_OK)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ((TORCHRUN, "2", "node0:29500"), "torchrun.sh: needed are NODES HOST:PORT file.py, given: 2 node0:29500;"),
        ((TORCHRUN, "two", "node0:29500", SMALL), "NODES is two; give the number of hosts, such as 2"),
        ((TORCHRUN, "2", "node0", SMALL), "node0 is not HOST:PORT; give one of the hosts and a free port"),
        ((TORCHRUN, "2", "node0:29500", "none.py"), "there is no file none.py in "),
        ((TORCHRUN, "2", "nowhere.invalid:29500", SMALL), "no way leads from "),
        ((TORCHRUN, "2", "localhost:29500", SMALL), "back to itself (127.0.0.1); give its address"),
        ((MPIRUN, "hosts"), "mpirun.sh: needed are HOSTFILE and a program, given: hosts;"),
        ((MPIRUN, "none", SMALL), "there is no file of hosts none; write one"),
        ((MPIRUN, "/dev/null", SMALL), "/dev/null names no host; write a line for each, such as: node0 slots=8"),
        ((SLURM, "dp_basic.py"), "slurm.sbatch: not inside a job; submit it: sbatch scripts/launch/slurm.sbatch"),
    ],
)  # fmt: skip
def test_what_is_missing_is_one_line(command: tuple[str, ...], says: str) -> None:
    done = on_this_host(*command)
    assert done.returncode == 2, done
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: Path(lesson[0]).stem)
def test_two_hosts_give_the_numbers_of_one(
    lesson: tuple[str, ...], hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    both = [
        host.start(TORCHRUN, "2", f"{hosts[0].address}:29500", *lesson, "--json", str(two)) for host in hosts
    ]
    shown = [said(process) for process in both]
    assert [process.returncode for process in both] == [0, 0], shown
    assert "proved: equal to one device" in "".join(shown)
    alone = on_this_host("python", *lesson, "--nproc", "4", "--json", str(one))
    assert alone.returncode == 0, alone.stderr
    assert numbers(two) == numbers(one)
    assert numbers(two)[0]["ranks"] == 4


def numbers(file: Path) -> list[dict[str, Any]]:
    """Return a lesson's records without the measured fields: times and memory."""
    timed = {"step_seconds", "communication_seconds", "seconds_by_axis", "peak_memory_bytes"}
    records = [json.loads(line) for line in file.read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in timed} for record in records]


def test_a_rank_killed_on_one_host_is_named_on_the_other(
    hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPROC", "1")
    words = (TORCHRUN, "2", f"{hosts[0].address}:29500", SMALL, "--bad", "1", "--how", "kill")
    both = [host.start(*words) for host in hosts]
    shown = [said(process) for process in both]
    assert all(process.returncode for process in both)
    (other,) = (text for text in shown if "rank 0 failed in all_reduce over 'world'" in text)
    assert "rank 1 does not answer: it was killed" in other
    (there,) = (text for text in shown if text is not other)
    assert "Signal 9 (SIGKILL)" in there


def test_torchrun_with_a_rank_for_each_node(hosts: tuple[Host, Host]) -> None:
    """The static form: each host is given its number, and all meet at the first one's address."""
    words = ("--nnodes=2", "--nproc_per_node=2", f"--master_addr={hosts[0].address}", "--master_port=29500")
    both = [host.start("torchrun", f"--node_rank={n}", *words, SMALL) for n, host in enumerate(hosts)]
    shown = [said(process) for process in both]
    assert [process.returncode for process in both] == [0, 0], shown
    assert "torchrun gloo 4 ranks: 4" in "".join(shown)


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the pipe to the other host's shell that takes the place of ssh; AGENT is what writes into it."""
    pipe, agent = tmp_path / "pipe", tmp_path / "agent"
    os.mkfifo(pipe)
    agent.write_text(f'#!/bin/sh\nshift\nprintf "%s\\n" "$*" >{pipe}\n')
    agent.chmod(0o755)
    monkeypatch.setenv("AGENT", str(agent))
    return pipe


def test_mpirun_on_two_hosts(hosts: tuple[Host, Host], pipe: Path, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    lines = [f"{host.address} slots={n} max_slots=9\n" for host, n in zip(hosts, (2, 1), strict=True)]
    hostfile.write_text("# two of them\n\n" + "".join(lines))
    names = over_both(hosts, pipe, MPIRUN, str(hostfile), "/bin/uname", "-n")
    assert sorted(re.findall(r"^node\d$", names, re.MULTILINE)) == ["node0", "node0", "node1"]
    assert "openmpi mpi 3 ranks: 3" in over_both(hosts, pipe, MPIRUN, str(hostfile), SMALL)


def test_mpirun_with_hosts_on_its_command_line(hosts: tuple[Host, Host], pipe: Path) -> None:
    """-H names hosts and slots, -x passes variables; with an address and a port, ranks meet there."""
    given = f"MASTER_ADDR={hosts[0].address}"
    words = [
        "--prtemca",
        "plm_ssh_agent",
        os.environ["AGENT"],
        "-x",
        given,
        "-x",
        "MASTER_PORT=29500",
        "-x",
        "PATH",
    ]
    slots = ",".join(f"{host.address}:2" for host in hosts)
    assert "openmpi mpi 4 ranks: 4" in over_both(hosts, pipe, "mpirun", "-H", slots, *words, "python", SMALL)


def over_both(hosts: tuple[Host, Host], pipe: Path, *words: str) -> str:
    """Return the output of mpirun, which sometimes hangs before a rank starts: it has two tries."""
    for seconds in (40, 120):
        there, here = hosts[1].start("sh", str(pipe)), hosts[0].start(*words)
        try:
            shown = here.communicate(timeout=seconds)[0]
            said(there)
            return shown
        except subprocess.TimeoutExpired:
            for process in (here, there):
                for started in psutil.Process(process.pid).children(recursive=True):
                    started.kill()
                process.kill()
                process.wait()
    pytest.fail(f"no end within {seconds} s: {words}", pytrace=False)


@pytest.mark.parametrize(("name", "words"), [("mpirun", ["hosts"]), ("torchrun", ["1", "127.0.0.1:29500"])])
def test_a_launcher_of_the_system_starts_the_environment_s_python(
    name: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An mpirun or torchrun from a system module starts .venv's Python, even if .venv is not activated."""
    script = tmp_path / "checkout" / "scripts" / "launch" / f"{name}.sh"
    environment, system = tmp_path / "checkout" / ".venv" / "bin", tmp_path / "system"
    for folder in (script.parent, environment, system):
        folder.mkdir(parents=True)
    shutil.copy(FOLDER / script.name, script)
    (environment / "activate").write_text(f"PATH={environment}:$PATH\n")
    (environment / "python").symlink_to(sys.executable)
    (system / name).write_text("#!/bin/sh\ncommand -v python\n")
    (system / name).chmod(0o755)
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    monkeypatch.setenv("PATH", f"{system}:{os.environ['PATH']}")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.chdir(tmp_path)
    assert on_this_host(str(script), *words, SMALL).stdout == f"{environment / 'python'}\n"


def test_the_job_of_slurm_runs_a_rank_a_task(tmp_path: Path) -> None:
    """The Slurm job calls srun with one rank per task; a script that prints its arguments stands for srun."""
    stub = tmp_path / "srun"
    stub.write_text('#!/bin/sh\necho "srun $* with $OMP_NUM_THREADS $SRUN_CPUS_PER_TASK"\n')
    stub.chmod(0o755)
    given = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_CPUS_PER_TASK": "4",
        "VIRTUAL_ENV": "/somewhere",
    }
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | given

    def submit(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        env = environment | more
        return subprocess.run([SLURM, *words], capture_output=True, text=True, cwd=tmp_path, env=env)

    lesson = "01-data-parallelism/pytorch/dp_basic.py"
    assert submit(lesson, "--batch", "64").stdout == (
        f"srun --kill-on-bad-exit=1 --wait=60 python {lesson} --batch 64 with 4 4\n"
    )
    shown = submit("Makefile", PMI="pmix", OMP_NUM_THREADS="2").stdout
    assert shown == "srun --kill-on-bad-exit=1 --wait=60 --mpi=pmix ./Makefile with 2 4\n"
    assert "there is no file none.py in " in submit("none.py").stderr
    bare = submit(lesson, VIRTUAL_ENV="", ROOT=str(tmp_path), SLURM_SUBMIT_DIR=str(tmp_path))
    assert bare.returncode == 2
    (tmp_path / "lesson.py").touch()
    assert "run make setup" in submit("lesson.py", VIRTUAL_ENV="", ROOT=str(tmp_path)).stderr
    asked = re.findall(r"^#SBATCH --([a-z-]+)=", Path(SLURM).read_text(), re.MULTILINE)
    assert {"nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "output"} <= set(asked)


def test_the_job_of_kubernetes_is_what_its_operator_reads() -> None:
    """The job has the fields of Kubeflow's training operator: pkg/apis/kubeflow.org/v1/pytorch_types.go."""
    job = yaml.safe_load((FOLDER / "kubernetes.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])  # the pods' services bear it
    spec, worker = job["spec"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert spec.keys() <= {"elasticPolicy", "runPolicy", "pytorchReplicaSpecs", "nprocPerNode"}
    policy = spec["elasticPolicy"]
    assert policy["rdzvBackend"] == "c10d"
    assert policy["minReplicas"] == policy["maxReplicas"] == worker["replicas"]  # a mesh has one size
    assert spec["runPolicy"]["cleanPodPolicy"] in ("Running", "All", "None")
    assert worker["restartPolicy"] in ("OnFailure", "Never", "Always", "ExitCode")
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    program = container["args"][0]
    assert (ROOT / program).is_file()
    assert all(isinstance(word, str) for word in container["command"] + container["args"])
    assert all(isinstance(variable["value"], str) for variable in container["env"])
    ranks = container["command"][1].partition("--nproc_per_node=")[2]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(ranks)
    volumes = {volume["name"] for volume in worker["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


@pytest.mark.parametrize("script", sorted(ROOT.glob("0[1-6]-*/pytorch/run.sh")), ids=lambda p: p.parts[-3])
def test_a_chapter_starts_from_any_folder(script: Path, tmp_path: Path) -> None:
    """A chapter's script finds its first lesson from any folder; the stand-in for Python fails there."""
    activate = tmp_path / "bin" / "activate"
    activate.parent.mkdir()
    activate.write_text('python() { test -f "$1" && echo "found $1"; return 3; }\n')
    variables = {**os.environ, "VENV": str(tmp_path), "VIRTUAL_ENV": ""}
    done = subprocess.run(["bash", script], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")
    assert "found 0" in done.stdout
