"""A torchx component: a pipeline on any scheduler that torchx knows.

torchx run --scheduler local_cwd launch/torchx_component.py:pipeline --stages 2 --script train.py
"""

import shlex

import torchx.specs as specs


def pipeline(
    *script_args: str,
    script: str,
    stages: int = 2,
    replicas: int = 1,
    nodes: int = 1,
    image: str = ".",
    cpu: int = 2,
    gpu: int = 0,
    memory: int = 4096,
    port: int = 29400,
) -> specs.AppDef:
    """Start a script that calls rpcpipe.run on a number of nodes.

    Args:
        script_args: arguments of the script
        script: the script
        stages: stages of each pipeline
        replicas: number of pipelines
        nodes: number of nodes, over which the processes are divided
        image: container image, or folder, to run in
        cpu: cores of a node
        gpu: GPUs of a node
        memory: MB of a node
        port: on which the first node is met
    """
    command = ["--stages", str(stages), "--replicas", str(replicas), "--nnodes", str(nodes)]
    if nodes > 1:
        first = f"$${{{specs.macros.rank0_env}:=localhost}}"  # torchx's variable for the first host
        command += ["--rdzv-backend", "c10d", "--rdzv-id", specs.macros.app_id]
        meet = f"--rdzv-endpoint {first}:{port}"
        line = (
            f"{shlex.join(['rpcpipe-run', *command])} {meet} {shlex.join([script, *script_args])}"
        )
        entrypoint, args = "bash", ["-c", line]
    else:
        entrypoint, args = "rpcpipe-run", [*command, script, *script_args]
    role = specs.Role(
        name="pipeline",
        image=image,
        entrypoint=entrypoint,
        args=args,
        num_replicas=nodes,
        resource=specs.Resource(cpu=cpu, gpu=gpu, memMB=memory),
        port_map={"c10d": port},
    )
    return specs.AppDef(name="rpcpipe", roles=[role])
