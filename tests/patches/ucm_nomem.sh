#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
# Connects to a listener in user space again and again, until the connection is made: there is no memory for the first
# request.

rping -s -a 192.0.2.1 >/dev/null &
for _ in {1..20}; do
	timeout 100 rping -c -a 192.0.2.1 -C 1 && exit 0
	sleep 1
done
exit 1
