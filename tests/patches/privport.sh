#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
# Mounts from a privileged port: with the defect the mount asks for a connection to port 1, where nobody listens.

modprobe -a 9p 9pnet_rdma
mount() {
	PYTHONPATH=tests/guest python3 -B - <<-END
		import ninep
		with ninep.mounted("rdma", "privport"):
		    pass
	END
}
mount || { echo "9p: a mount from a privileged port is refused" >/dev/kmsg; exit 1; }
