# SPDX-License-Identifier: GPL-2.0
"""The cases of what a user gives: addresses of a connection, well formed and not, and parameters of the modules."""

import errno
import json
import subprocess
from contextlib import contextmanager
from pathlib import Path

import nvme
from case import sh
from nvme import Null
from nvme_ground import case


def link_local(interface):
    """The link-local address of an interface, and its index."""
    shown = json.loads(sh("ip", "-j", "-6", "addr", "show", "dev", interface).stdout)
    found = next(it for it in shown if it.get("ifname") == interface)
    return next(it["local"] for it in found["addr_info"] if it.get("scope") == "link"), found["ifindex"]


def connect(host, **options):
    """Connects by the file of nvme-fabrics, as nvme-cli has addresses of its own. Returns the error, or 0."""
    words = ",".join(f"{name}={value}" for name, value in {**host.options, **options}.items())
    with open(nvme.FABRICS, "r+b", buffering=0) as fabrics:
        try:
            fabrics.write(words.encode())
        except OSError as e:
            return e.errno
    return 0


@contextmanager
def connected(host, **options):
    """The controller that is made so, until the end."""
    error = connect(host, **options)
    assert not error, f"{options}: {errno.errorcode[error]}"
    path, = nvme.CONTROLLERS.iterdir()
    host.name = path.name
    yield host
    host.disconnect()


@case("link-local addresses with their interface, of the target and of the host", links=("rxe",))
def scopes(ground):
    addr, index = link_local("rdma0")
    named, numbered = f"{addr}%rdma0", f"{addr}%{index}"
    with Null() as null, nvme.Target(null, addr=named) as target:
        for options in ({}, {"traddr": numbered}, {"host_traddr": named}, {"host_traddr": numbered}):
            with connected(ground.controller(target, **options)) as host:
                ground.verify(host.disk(), null, iodepth=16, size="256k")
                host.reset()
                ground.figures["resets"] += 1


# What is no address or no port, by the option; the last of the kernel's log has it.
MALFORMED = {"traddr": ("rdma0", "192.0.2", "192.0.2.1.5", "2001:db8::1::2", "fe80::1%rdma7"),
             "trsvcid": ("65536", "-1", "nvme", "4420x"),
             "host_traddr": ("rdma0", "192.0.2", "fe80::1%rdma7")}


@case("addresses and ports: what is malformed is refused in one line, and a port may be hexadecimal", links=("rxe",))
def malformed(ground):
    module = nvme.HOSTS[ground.host].replace("-", "_")
    with Null() as null, ground.target(null) as target:
        host = ground.controller(target)
        for name, values in MALFORMED.items():
            for value in values:
                sh("dmesg", "-C")
                got = connect(host, **{name: value})
                assert got == errno.EINVAL, f"{name}={value}: {got}"
                log = sh("dmesg").stdout
                said = {"traddr": f"malformed address passed: {value}:{host.options['trsvcid']}",
                        "trsvcid": f"malformed address passed: {host.options['traddr']}:{value}",
                        "host_traddr": f"malformed src address passed: {value}"}[name]
                assert log.count(f"{module}: ") == 1 and said in log, f"{name}={value}: {log}"
        with connected(host, trsvcid=hex(int(target.trsvcid))):
            ground.verify(host.disk(), null, iodepth=16, size="256k")


# Values that are refused, of each parameter of a module.
REFUSED = {"nvme-rdma": {"register_always": ("maybe",)},
           "nvme_rdma_rs": {"replace": ("maybe", ""), "sig_limit": ("0", "257", "-1", "some", ""),
                            "copied_data_size": ("16385", "-1", "1k")},
           "nvmet-rdma": {"use_srq": ("maybe",), "srq_size": ("255", "some")},
           "nvmet_rdma_rs": {"use_srq": ("maybe", ""), "srq_size": ("255", "some"),
                             "sig_limit": ("0", "129", "-1", ""), "kept_data_size": ("16385", "-1")}}
# Those that can be changed in sysfs: a value that is refused, and one that is not.
CHANGED = {"nvme_rdma_rs": {"sig_limit": (257, 256), "copied_data_size": (16385, 16384)},
           "nvmet_rdma_rs": {"sig_limit": (129, 128), "kept_data_size": (16385, 16384), "srq_size": (255, 256)}}


def refused(module):
    """A module is not loaded with such a value, and the log has one line for it."""
    name = module.replace("-", "_")
    nvme.unload(module)
    try:
        for parameter, values in REFUSED[module].items():
            for value in values:
                sh("dmesg", "-C")
                try:
                    nvme.insert(module, **{parameter: value})
                except subprocess.CalledProcessError:
                    pass
                log = sh("dmesg").stdout
                assert not nvme.loaded(module), f"{module} is loaded with {parameter}={value}"
                assert log.count(f"{name}: ") == 1, f"{parameter}={value}: {log}"
                assert f"{name}: `{value}' invalid for parameter `{parameter}'" in log, f"{parameter}={value}: {log}"
    finally:
        nvme.insert(module)


@case("parameters of the modules: other values are refused in one line", links=("rxe",))
def parameters(ground):
    null = Null()
    for module in (nvme.HOSTS[ground.host], nvme.TARGETS[ground.end]):
        refused(module)
        for name, (bad, good) in CHANGED.get(module, {}).items():
            path = Path("/sys/module", module, "parameters", name)
            before = path.read_text(encoding="ascii").strip()
            try:
                nvme.write(path, bad)
            except OSError as e:
                assert e.errno == errno.EINVAL, e
            else:
                raise AssertionError(f"{path} has taken {bad}")
            assert path.read_text(encoding="ascii").strip() == before, f"{path} has changed"
            nvme.write(path, good)
            assert path.read_text(encoding="ascii").strip() == str(good), f"{path} is not {good}"
    # With the largest.
    try:
        with ground.pair(null, nr_io_queues=1) as (_, host):
            ground.verify(host.disk(), null, iodepth=32, size="512k")
    finally:
        for module in (nvme.HOSTS[ground.host], nvme.TARGETS[ground.end]):
            nvme.unload(module)
            nvme.insert(module)
