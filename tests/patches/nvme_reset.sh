#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
# Deletes a controller of nvme-rdma while it is being reset: when it has been disabled, and is yet to connect.

PYTHONPATH=tests/guest exec python3 -B - <<-END
	import subprocess
	import nvme
	from nvme_grounds import HostGround
	from nvme_target import Target
	from peer import Peer

	with HostGround("c") as ground, Peer(1 << 24) as peer:
	    target = Target(peer)
	    with ground.connected(target) as host:
	        path = host.path()

	        def both():
	            reset = subprocess.Popen(["bash", "-c", f"echo 1 >{path}/reset_controller"])
	            nvme.until(lambda: not target.cc & 1, "the controller is not disabled")
	            nvme.write(path / "delete_controller", 1)
	            reset.wait()

	        _, failed = host.beside(both)
	        if failed:
	            raise failed
	    ground.check()
END
