"""Which rank a process is, under every launcher, under none, and where the environment is partial or contradictory."""

import dataclasses

import pytest

from harness.refusals import refused
from shardwise.launch.environment import LAUNCHER_FD, RankEnv, detect, first_host, lone_rank

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
# A batch script on two nodes, before srun: SLURM_PROCID stands there too.
SBATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[003-004]",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
SRUN = {
    **SBATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
# The shell of salloc where Slurm runs it as a step of its own: the job's eight tasks, the step's one.
SALLOC_STEP = {
    **SBATCH,
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "gpu003",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}

TORCHRUN_ENV = RankEnv(5, 1, 8, 4, "node0", 29500, attempt=2, launcher="torchrun", agent_store=True)
SRUN_ENV = RankEnv(5, 1, 8, 4, "gpu003", 14711, attempt=0, launcher="slurm")


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"MASTER_ADDR": "node0", "MASTER_PORT": "1"}, None),  # left over in a profile: says nothing about ranks
        (TORCHRUN, TORCHRUN_ENV),
        (
            without(TORCHRUN, "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"),
            RankEnv(5, 1, 8, 8, "node0", 29500, attempt=0, launcher="torchrun"),
        ),
        (
            {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", LAUNCHER_FD: "3"},
            RankEnv(0, 0, 8, 4, "node0", 29500, attempt=2, launcher="local", agent_store=True),
        ),
        (SRUN, SRUN_ENV),
        ({**SRUN, "SLURM_RESTART_COUNT": "3"}, dataclasses.replace(SRUN_ENV, attempt=3)),
        ({**SRUN, "SLURM_STEP_ID": "2"}, dataclasses.replace(SRUN_ENV, master_port=14711 + 2018)),
        (
            {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "5,3", "SLURM_STEP_NODELIST": "a,b"},
            dataclasses.replace(SRUN_ENV, local_world_size=3, master_addr="a"),
        ),
        # What job scripts export by habit goes with srun's own.
        (
            {**SRUN, "MASTER_ADDR": "node9", "MASTER_PORT": "6000", "WORLD_SIZE": "8"},
            dataclasses.replace(SRUN_ENV, master_addr="node9", master_port=6000),
        ),
        # torchrun started by srun, once a node.
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "2", **TORCHRUN}, TORCHRUN_ENV),
        (SBATCH, None),
        (SALLOC_STEP, None),
        (without(SBATCH, "SLURM_PROCID"), None),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"}, None),
    ],
)
def test_detect(environ, expected):
    assert detect(environ) == expected


@pytest.mark.parametrize(
    ("environ", "values"),
    [
        (without(TORCHRUN, "WORLD_SIZE"), ("launcher-variable-unset", "WORLD_SIZE")),
        (without(TORCHRUN, "LOCAL_RANK"), ("launcher-variable-unset", "LOCAL_RANK")),
        (without(TORCHRUN, "MASTER_ADDR"), ("launcher-variable-unset", "MASTER_ADDR")),
        (without(TORCHRUN, "MASTER_PORT"), ("launcher-variable-unset", "MASTER_PORT")),
        (without(TORCHRUN, "RANK"), ("rank-unset", "LOCAL_RANK")),
        ({**SBATCH, "WORLD_SIZE": "8"}, ("rank-unset", "WORLD_SIZE")),  # srun was forgotten
        ({**TORCHRUN, "RANK": "8"}, ("rank-below-world-size", "rank 8", "0 to 7")),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, ("local-rank-fits", "local rank 4 of 4")),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, ("local-rank-fits", "local rank 1 of 9", "world size 8")),
        ({**TORCHRUN, "RANK": "-1"}, ("launcher-number", "RANK='-1'")),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, ("launcher-number", "WORLD_SIZE='two'")),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, ("master-port", "MASTER_PORT=70000")),
        (without(SRUN, "SLURM_LOCALID"), ("slurm-variable-unset", "SLURM_LOCALID")),
        ({**SRUN, "SLURM_PROCID": "8"}, ("rank-below-world-size", "rank 8")),
        ({**SRUN, "SLURM_NODEID": "2"}, ("slurm-node-id", "SLURM_NODEID=2", "2 nodes")),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "four"}, ("slurm-tasks-per-node", "SLURM_STEP_TASKS_PER_NODE='four'")),
        ({**SRUN, "SLURM_STEP_NODELIST": "gpu[3-"}, ("slurm-node-list", "SLURM_STEP_NODELIST='gpu[3-'")),
    ],
)
def test_a_partial_or_contradictory_environment_is_refused(environ, values):
    with refused(*values):
        detect(environ)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("login1", "login1"),
        ("a-1.cluster,b", "a-1.cluster"),
        ("n[1-4]", "n1"),
        ("n[012,015-020],m[1-2]", "n012"),
        ("rack[3-4]n[07-08]x", "rack3n07x"),
    ],
)
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host


def test_ports_of_neighbouring_jobs_differ_and_are_no_ephemeral_ports():
    ports = [detect({**SRUN, "SLURM_JOB_ID": str(job)}).master_port for job in range(19_990, 20_010)]
    assert len(set(ports)) == len(ports)
    assert all(1024 <= port < 32_768 for port in ports)


def test_a_lone_rank_is_a_world_of_one():
    assert (lone_rank().rank, lone_rank().world_size, lone_rank().launcher) == (0, 1, "none")
