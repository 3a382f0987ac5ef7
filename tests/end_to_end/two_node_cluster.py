"""A Ray cluster of two nodes on this machine: `RAY_TMPDIR=FOLDER python -m tests.end_to_end.two_node_cluster`.

The program prints the address of the cluster when both nodes have started. The cluster ends with this process, and the
process ends with its standard input. Ray's files are in the folder, whose path must be short. In Ray's usual folder,
other programs of this machine would find the cluster and connect to it.
"""

import sys

from ray.cluster_utils import Cluster

SLOTS = 16
"""The nominal number of CPUs of a node. verl reserves 3 for each rank, and more for its other processes."""


def start() -> Cluster:
    """Start the nodes, each with the slot of one rank."""
    node = {"num_cpus": SLOTS, "num_gpus": 1}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    cluster.wait_for_nodes(timeout=300)
    return cluster


if __name__ == "__main__":
    cluster = start()
    sys.stdout.write(f"{cluster.address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    cluster.shutdown()
