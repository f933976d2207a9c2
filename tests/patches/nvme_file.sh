#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
# Unloads nvme-rdma while the file is open by which a controller was created, and closes it then.

PYTHONPATH=tests/guest exec python3 -B - <<-END
	import nvme
	from case import sh
	from nvme_faults import in_use
	from nvme_grounds import HostGround
	from nvme_target import Target
	from peer import Peer

	module = nvme.HOSTS["c"]
	with HostGround("c") as ground, Peer(1 << 24) as peer:
	    target = Target(peer)
	    host = ground.connected(target)
	    ground.hosts.append(host)

	    def beside(function):
	        result, failed = host.beside(function)
	        if failed:
	            raise failed
	        return result

	    with open(nvme.FABRICS, "r+b", buffering=0) as file:
	        words = ",".join(f"{name}={value}" for name, value in host.controller.options.items())
	        beside(lambda: file.write(words.encode()))
	        # With the defect rmmod deletes the controller, and the kernel fails when the file is closed.
	        if beside(lambda: in_use(module)):
	            beside(lambda: sh("nvme", "disconnect", "-n", target.nqn))
	            assert in_use(module), "it was unloaded, with a file that has a controller"
	    assert nvme.loaded(module), "it was unloaded, with a file that had a controller"
	    ground.check()
END
