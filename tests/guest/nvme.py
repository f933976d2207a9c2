# SPDX-License-Identifier: GPL-2.0
"""NVMe over RDMA for the tests in a VM: a target by configfs, a host by nvme-cli, and fio.

    with nvme.ends(), nvme.Null() as null, nvme.Target(null) as target, nvme.Controller(target) as host:
        nvme.fio(host.disk(), rw="randwrite", bs="4k", verify="crc32c")

What a test has set up is taken down in the opposite order; left() tells what is there all the same."""

import errno
import json
import os
import re
import subprocess
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from signal import SIGINT

import wire
from case import BUILD, FLAVOUR, SECONDS, sh
from rping import ADDR, ports

CONFIG = Path("/sys/kernel/config")
NVMET = CONFIG / "nvmet"
FABRICS = Path("/dev/nvme-fabrics")
CONTROLLERS = Path("/sys/class/nvme")
# The modules of each end, by name, and the name that a host's transport is registered with. nvmet has one transport for
# RDMA at a time.
HOSTS = {"c": "nvme-rdma", "rust": "nvme_rdma_rs"}
TRANSPORTS = {"c": "rdma", "rust": "rdma_rs"}
TARGETS = {"c": "nvmet-rdma", "rust": "nvmet_rdma_rs"}
# Those below the transports, which the two ends share.
CORES = ("rdma_rs", "nvmet", "nvme-fabrics", "nvme-core", "nvme-auth", "nvme-keyring")
# Modules of build/ that modprobe is told of.
INSTALLED = Path("/run/modprobe.d/nvme.conf")
# Where file systems are mounted.
FOLDER = Path("/run/nvme-tree")
# The parameters that modules are loaded with, by their names.
PARAMETERS = {}
HOSTNQN = "nqn.2014-08.org.nvmexpress:uuid:6c1e1d34-6f0b-4a0c-8d5a-4f5d1f2b9a{:02x}"
MIB = 1 << 20
# The exit status of fio after a signal.
INTERRUPTED = 128
# The address of the target on each link: an rxe link on a dummy interface, where packets are looped back; two rxe links
# with a wire between them; siw; the null device.
LINKS = {"rxe": ADDR, "wire": wire.FAR, "siw": "198.18.0.1", "null": "203.0.113.1"}
numbers = iter(range(1, 1 << 30))


def until(condition, what, seconds=60):
    """Waits for a condition, and returns what it has returned."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what} after {seconds} s")
        time.sleep(0.02)
    return found


def write(path, value):
    """Writes a file of configfs or sysfs by one system call."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, str(value).encode())
    except OSError as e:
        raise OSError(e.errno, f"{os.strerror(e.errno)}: {path} = {value}") from None
    finally:
        os.close(fd)


def up(link):
    """Makes a link."""
    if link == "rxe":
        sh("/rdma-rs/tests/guest/up", "none")
    elif link == "wire":
        wire.up(apart=False)
    elif link == "null":
        # Its cases make the device.
        sh("ip", "link", "set", "lo", "up")
    else:
        sh("modprobe", "-a", "dummy", "siw")
        # A device of TCP, which takes that way to an address of its own.
        sh("ip", "link", "set", "lo", "up")
        sh("ip", "link", "add", "rdma1", "type", "dummy")
        sh("ip", "addr", "add", f"{LINKS[link]}/24", "dev", "rdma1")
        sh("ip", "link", "set", "rdma1", "up")
        sh("rdma", "link", "add", "siw0", "type", "siw", "netdev", "rdma1")


def loaded(module):
    return Path("/sys/module", module.replace("-", "_")).exists()


def insert(*modules, **parameters):
    """Loads modules of the kernel, and those of build/ after the ones that they need. Only one may have parameters."""
    ours = {module: path for module in modules if (path := BUILD / FLAVOUR / f"{module}.ko").exists()}
    kernels = [module for module in modules if module not in ours]

    def words(module=None):
        return [f"{name}={value}" for name, value in {**PARAMETERS.get(module, {}), **parameters}.items()]

    if kernels:
        sh("modprobe", *(kernels + words() if parameters else ["-a", *kernels]))
    for module, path in ours.items():
        if not loaded(module):
            insert(*filter(None, sh("modinfo", "-F", "depends", path).stdout.strip().split(",")))
            sh("insmod", path, *words(module))


def knows(module, parameters):
    """Fails unless a module has these parameters: one that has not is loaded all the same."""
    path = BUILD / FLAVOUR / f"{module}.ko"
    known = {line.partition(":")[0] for line in
             sh("modinfo", "-F", "parm", path if path.exists() else module).stdout.splitlines()}
    assert known >= set(parameters), f"{module} has the parameters {known}, not {parameters}"


def named(end, modules):
    """The name of an end, whose module is loaded with the parameters behind it from here on (rust,sig_limit=16)."""
    name, *words = end.split(",")
    if words:
        module, parameters = modules[name], dict(word.split("=") for word in words)
        knows(module, parameters)
        PARAMETERS[module] = parameters
    return name


@contextmanager
def installed(module, *aliases, **parameters):
    """Has modprobe know a module of build/ by its aliases, as if it were installed, and by others, and load it with
    these parameters. Those of the kernel it knows."""
    path = BUILD / FLAVOUR / f"{module}.ko"
    if not path.exists():
        yield
        return
    words = [f"{name}={value}" for name, value in {**PARAMETERS.get(module, {}), **parameters}.items()]
    aliases = [*aliases, *sh("modinfo", "-F", "alias", path).stdout.split()]
    INSTALLED.parent.mkdir(exist_ok=True)
    INSTALLED.write_text("".join(f"alias {alias} {module}\n" for alias in aliases) +
                         " ".join(["install", module, "insmod", str(path), *words]) + "\n", encoding="ascii")
    try:
        yield
    finally:
        INSTALLED.unlink()


@contextmanager
def module_with(module, **parameters):
    """Has a module loaded with parameters, in place of the one that is there."""
    knows(module, parameters)
    unload(module)
    insert(module, **parameters)
    try:
        yield
    finally:
        unload(module)
        insert(module)


def host_with(end, **parameters):
    """The same for the module of a host."""
    return module_with(HOSTS[end], **parameters)


def target_with(end, **parameters):
    """The same for that of a target."""
    return module_with(TARGETS[end], **parameters)


def load(host="c", target="c"):
    """Loads the modules of the named ends; either may be None."""
    insert("configfs", *(names[end] for names, end in ((HOSTS, host), (TARGETS, target)) if end))
    if not CONFIG.is_mount():
        sh("mount", "-t", "configfs", "configfs", CONFIG)


def unload(*modules):
    """Unloads modules, without others all of NVMe, of those that are loaded."""
    for module in modules or (*HOSTS.values(), *TARGETS.values(), *CORES):
        if loaded(module):
            sh("rmmod", module)


@contextmanager
def one_worker():
    """Has one worker for all work items of nvmet, as an administrator may want it."""
    most = Path("/sys/bus/workqueue/devices/nvmet-wq/max_active")
    before = most.read_text(encoding="ascii")
    write(most, 1)
    try:
        yield
    finally:
        write(most, before)


@contextmanager
def one_cpu(number=0):
    """Has this thread, and those that it starts, on one CPU."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {number})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cpus)


@contextmanager
def ends(host="c", target="c"):
    """Has the modules of the named ends loaded."""
    load(host, target)
    try:
        yield
    finally:
        unload()


class Null:
    """A null_blk device with memory of its own. Its attributes are those of null_blk in configfs."""

    def __init__(self, size=64, **attributes):
        self.name = f"nullb_rdma{next(numbers)}"
        self.path = CONFIG / "nullb" / self.name
        self.device = Path("/dev", self.name)
        self.attributes = {"size": size, "memory_backed": 1, "discard": 1, "blocksize": 512, **attributes}

    def __enter__(self):
        if not loaded("null_blk"):
            sh("modprobe", "null_blk", "nr_devices=0")
        self.path.mkdir()
        try:
            for name, value in {**self.attributes, "power": 1}.items():
                write(self.path / name, value)
            until(self.device.exists, f"{self.device} is not there")
        except BaseException:
            self.path.rmdir()
            raise
        return self

    def __exit__(self, *_):
        self.path.rmdir()


class Ram:
    """A RAM disk, which brd makes when it is loaded."""

    device = Path("/dev/ram0")

    def __init__(self, size=64):
        self.size = size

    def __enter__(self):
        sh("modprobe", "brd", "rd_nr=1", f"rd_size={self.size << 10}")
        until(self.device.exists, f"{self.device} is not there")
        return self

    def __exit__(self, *_):
        sh("rmmod", "brd")


class File:
    """A file in memory, which the target reads and writes without its page cache, or with it (buffered)."""

    def __init__(self, size=64, buffered=False):
        self.size, self.namespace = size, {"buffered_io": int(buffered)}
        self.device = Path(f"/run/nvme-rdma-{next(numbers)}")

    def __enter__(self):
        with self.device.open("wb") as file:
            file.truncate(self.size * MIB)
        return self

    def __exit__(self, *_):
        self.device.unlink()


class Loop(File):
    """A loop device on such a file."""

    def __enter__(self):
        super().__enter__()
        self.namespace = {}
        self.file = self.device
        sh("modprobe", "loop")
        self.device = Path(sh("losetup", "--find", "--show", self.file).stdout.strip())
        return self

    def __exit__(self, *_):
        sh("losetup", "--detach", self.device)
        self.file.unlink()


class Port:
    """A port on an address, on which a subsystem is. Attributes (param_*) are those of configfs."""

    def __init__(self, subsystem, addr=ADDR, trsvcid=None, **attributes):
        self.subsystem, self.addr, self.trsvcid = subsystem, addr, str(trsvcid or next(ports))
        self.path = NVMET / "ports" / str(next(numbers))
        self.attributes = {"addr_adrfam": "ipv6" if ":" in addr else "ipv4", "addr_trtype": "rdma",
                           "addr_traddr": addr, "addr_trsvcid": self.trsvcid, **attributes}

    def __enter__(self):
        self.path.mkdir()
        try:
            for name, value in self.attributes.items():
                write(self.path / name, value)
            self.enable()
        except BaseException:
            self.path.rmdir()
            raise
        return self

    def __exit__(self, *_):
        self.disable()
        self.path.rmdir()

    def enable(self):
        """Has the port listen."""
        (self.path / "subsystems" / self.subsystem.name).symlink_to(self.subsystem)

    def disable(self):
        """Has the port no longer listen, and the connections of the subsystem end."""
        (self.path / "subsystems" / self.subsystem.name).unlink(missing_ok=True)


class Target:
    """A subsystem whose namespaces are the backings, 1 and up, on a port of its own.

    Attributes of the subsystem (attr_*), of the port (param_*) and of a namespace (a dictionary `namespace`
    of its backing) are those of configfs. Without an address it is that of the rxe link on a dummy interface."""

    def __init__(self, *backings, addr=ADDR, nqn=None, trsvcid=None, **attributes):
        self.nqn = nqn or f"rdma-rs-{next(numbers)}"
        self.backings = backings
        self.subsystem = NVMET / "subsystems" / self.nqn
        self.attributes = {"attr_allow_any_host": 1,
                           **{name: value for name, value in attributes.items() if name.startswith("attr_")}}
        self.port = Port(self.subsystem, addr, trsvcid,
                         **{name: value for name, value in attributes.items() if name not in self.attributes})
        self.addr, self.trsvcid = self.port.addr, self.port.trsvcid
        self.enable, self.disable = self.port.enable, self.port.disable
        self.undo = ExitStack()

    def __enter__(self):
        self.up()
        return self

    def __exit__(self, *_):
        self.down()

    def up(self):
        """Makes all of it."""
        with ExitStack() as undo:
            self.subsystem.mkdir()
            undo.callback(self.subsystem.rmdir)
            for name, value in self.attributes.items():
                write(self.subsystem / name, value)
            for nsid, backing in enumerate(self.backings, 1):
                undo.callback(self.remove, nsid)
                self.add(nsid, backing)
            undo.enter_context(self.port)
            self.undo = undo.pop_all()

    def down(self):
        """Removes what is there of it."""
        self.undo.close()

    def add(self, nsid, backing):
        """Adds a namespace, and enables it."""
        path = self.subsystem / f"namespaces/{nsid}"
        path.mkdir()
        for name, value in {"device_path": backing.device, **getattr(backing, "namespace", {}), "enable": 1}.items():
            write(path / name, value)

    def namespace(self, nsid, enable):
        """Enables or disables a namespace."""
        write(self.subsystem / f"namespaces/{nsid}/enable", int(enable))

    def remove(self, nsid):
        """Removes a namespace, if it is there."""
        path = self.subsystem / f"namespaces/{nsid}"
        if path.exists():
            path.rmdir()


def option(name, value):
    """An option of nvme connect, by its name with underscores."""
    name = name if name == "fast_io_fail_tmo" else name.replace("_", "-")
    return [f"--{name}"] if value is True else [f"--{name}={value}"]


class Controller:
    """A host's controller of a target. Options are those of nvme connect (nr_io_queues=1, queue_size=16)."""

    def __init__(self, target, end="c", **options):
        self.target = target
        self.hostnqn = HOSTNQN.format(next(numbers) % 256)
        self.options = {"transport": TRANSPORTS[end], "traddr": target.addr, "trsvcid": target.trsvcid,
                        "nqn": target.nqn, "hostnqn": self.hostnqn, "hostid": self.hostnqn.rpartition(":")[2],
                        **options}
        self.name = ""

    def __enter__(self):
        self.connect()
        return self

    def __exit__(self, *_):
        self.disconnect()

    def words(self):
        """The options of nvme connect."""
        return [word for name, value in self.options.items() for word in option(name, value)]

    def connect(self):
        """Connects, and waits for the namespaces."""
        said = sh("nvme", "connect", *self.words(), "--output-format=json").stdout
        self.name = json.loads(said)["device"]
        used = (self.path / "transport").read_text(encoding="ascii").strip()
        assert used == self.options["transport"], f"{self.name} is one of {used}"
        for nsid in range(1, len(self.target.backings) + 1):
            self.disk(nsid)

    def disconnect(self):
        """Has the controller deleted, unless it is gone."""
        if self.path.exists() and self.name:
            sh("nvme", "disconnect", f"--device={self.name}")
        until(lambda: not self.name or not self.path.exists(), f"{self.name} is still there")

    @property
    def path(self):
        return CONTROLLERS / self.name

    def way(self, nsid=1):
        """The folder in sysfs of the controller's path to a namespace of a multipath disk, once it is there."""
        def found():
            return [path for path in self.path.glob("nvme*c*n*")
                    if int((path / "nsid").read_text(encoding="ascii")) == nsid]
        return until(found, f"{self.name} has no path to namespace {nsid}")[0]

    def state(self):
        """The state of the controller; "gone" without one."""
        try:
            return (self.path / "state").read_text(encoding="ascii").strip()
        except OSError:
            return "gone"

    def settle(self, state="live", seconds=120):
        """Waits for a state."""
        until(lambda: self.state() == state, f"{self.name} is {self.state()} and not {state}", seconds)

    def reset(self):
        """Has the controller reset, and waits for that. On a busy machine it may just be connecting again by itself."""
        def done():
            self.settle()
            command = ["nvme", "reset", f"/dev/{self.name}"]
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        until(done, f"{self.name} is not reset", 300)

    def find(self, nsid=1):
        """The block device of a namespace, or None."""
        for path in Path("/sys/block").glob("nvme*n*"):
            # A path of a multipath disk is no device that one can open.
            if not re.fullmatch(r"nvme\d+n\d+", path.name):
                continue
            try:
                nqn = (path / "device/subsysnqn").read_text(encoding="ascii").strip()
                number = int((path / "nsid").read_text(encoding="ascii"))
            except OSError:
                # It is just going.
                continue
            if (nqn, number) == (self.target.nqn, nsid):
                return Path("/dev", path.name)
        return None

    def disk(self, nsid=1):
        """The block device of a namespace, once it can be read."""
        def ready():
            found = self.find(nsid)
            if not found or not int(Path("/sys/block", found.name, "size").read_text(encoding="ascii")):
                return None
            try:
                # udev makes the node before the disk is added.
                with open(found, "rb"):
                    return found
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENXIO):
                    return None
                raise
        return until(ready, f"no block device for namespace {nsid} of {self.target.nqn}")


@contextmanager
def mounted(disk, *options):
    """Has the file system on a disk mounted, and gives its folder."""
    FOLDER.mkdir(exist_ok=True)
    sh("mount", *options, disk, FOLDER)
    try:
        yield FOLDER
    finally:
        sh("umount", FOLDER)


def fio_words(filename, *jobs, **options):
    """The command line of fio for jobs, one after the other, of options with their values: those of all, and those of
    each. Data are verified to the last byte."""
    options = {"filename": filename, "ioengine": "libaio", "direct": 1, "thread": 1, "bs": "4k", "size": "4m",
               "randseed": 1, "allrandrepeat": 1, "verify_fatal": 1, "verify_state_save": 0, **options}
    words = ["fio", "--output-format=json"]
    for job in ({}, *(jobs or ({},))):
        # What is before the first name is for all jobs.
        words += [f"--{name}={value}" for name, value in (options or {"name": "job", "stonewall": 1, **job}).items()
                  if value is not None]
        options = {}
    return words


def fio_result(words, status, said, errors):
    """The jobs of fio's JSON; raises where one has failed."""
    text = said[said.find("{"):]
    problem = [line for line in (said[:said.find("{")] + errors).splitlines() if line.strip()]
    if status or not text.startswith("{"):
        raise AssertionError(f"fio failed ({status}): {'; '.join(problem)[:400]}: {' '.join(words[2:])}")
    jobs = json.loads(text)["jobs"]
    assert all(job["error"] == 0 for job in jobs), f"fio: {[job['error'] for job in jobs]}: {problem}"
    return jobs


def fio_jobs(filename, *jobs, **options):
    """Runs jobs of fio, and returns the figures of each."""
    words = fio_words(filename, *jobs, **options)
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False, cwd="/run")
    return fio_result(words, done.returncode, done.stdout, done.stderr)


def fio(filename, **options):
    """Runs a job of fio, and returns its figures."""
    return fio_jobs(filename, **options)[0]


def completed(disk):
    """The reads and writes that a disk has completed."""
    words = Path("/sys/block", disk.name, "stat").read_text(encoding="ascii").split()
    return int(words[0]) + int(words[4])


class Load:
    """A job of fio that runs beside what the test does: with Load(disk, ...) as load: ... The file may be one on a disk.

    Without a job of its own it writes at random, and verifies what it has written, until it is stopped."""

    # The I/Os after which it is under way: opening a disk makes some, too.
    FLOWING = 64
    JOB = {"rw": "randwrite", "verify": "crc32c", "verify_backlog": 64, "iodepth": 16, "time_based": 1, "runtime": 3600}

    def __init__(self, filename, disk=None, patience=60, **job):
        self.disk, self.words = disk or filename, fio_words(filename, **{**self.JOB, **job})
        self.patience = patience
        self.process = self.figures = None

    def __enter__(self):
        before = completed(self.disk)
        self.process = subprocess.Popen(self.words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                        cwd="/run")
        # A signal before that would end it without a word.
        until(lambda: completed(self.disk) > before + self.FLOWING or not self.running(), "no I/O is completed",
              self.patience)
        return self

    def __exit__(self, kind, *_):
        if self.figures is None and not kind:
            self.stop()
        if self.process.returncode is None:
            self.process.kill()
            self.process.communicate()

    def running(self):
        return self.process.poll() is None

    def end(self, signal=0):
        """Waits for the job's end, after a signal if that is not 0: its exit status, and what it has said."""
        if signal:
            self.process.send_signal(signal)
        said, errors = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, said, errors

    def wait(self):
        """Waits for the job's end, and returns its figures; raises where it has failed."""
        self.figures, = fio_result(self.words, *self.end())
        return self.figures

    def stop(self):
        """Has the job end now, and returns its figures; raises where it has failed before."""
        assert self.running(), f"fio has ended by itself: {self.end()[2][:400]}"
        status, said, errors = self.end(SIGINT)
        self.figures, = fio_result(self.words, 0 if status == INTERRUPTED else status, said, errors)
        return self.figures

    def broken(self):
        """Waits for the job's end, which must be an I/O error and no wrong data, and returns the error's name."""
        status, said, errors = self.end()
        self.figures = json.loads(said[said.find("{"):])["jobs"][0]
        error = self.figures["error"]
        assert status and error not in (0, errno.EILSEQ), f"fio ended with {status}, error {error}: {errors[:400]}"
        return errno.errorcode[error]


def objects():
    """The RDMA objects of the modules of both ends, a line each."""
    lines = []
    for kind in ("cm_id", "qp", "cq", "pd", "mr"):
        said = sh("rdma", "resource", "show", kind).stdout
        # C documents that the QPs of rdma_create_qp() are the connection manager's.
        lines += [line for line in said.splitlines() if re.search(r"comm \[(nvmet?|rdma_cm\])", line)]
    return lines


def left():
    """What is there of controllers, subsystems, ports and RDMA objects."""
    found = [str(path) for where in (CONTROLLERS, NVMET / "subsystems", NVMET / "ports", CONFIG / "nullb")
             if where.exists() for path in where.iterdir() if path.is_dir()]
    return found + objects()


def none_left(seconds=60):
    """Fails unless all is gone, which ends in work items."""
    end = time.monotonic() + seconds
    while found := left():
        assert time.monotonic() < end, f"still there: {'; '.join(found[:10])}"
        time.sleep(0.1)
