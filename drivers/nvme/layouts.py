#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Has rustc compare bindings of private headers with the kernel that a module is built for.

    layouts.py IMAGE MODULES BINDINGS SOURCE...

MODULES are modules of the kernel, compressed or not, IMAGE is its image: their BTF says how the kernel
itself lays out its types. Prints Rust that does not compile if a struct or union of BINDINGS, which
bindgen has made, has another size there, or a member another place or size, or if a constant has another
value, or if BINDINGS has a member that it has not. The compiler's message names it. The types that the Rust
files SOURCE name must be in the BTF, or be of a protocol (PROTOCOL). MODULES is a list in one word.

Constants that are macros (#define) are in no BTF and are never compared. Nor are types that SOURCE reaches
without their name.
"""

import gzip
import lzma
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path

# Kinds of types in BTF (Documentation/bpf/btf.rst), and the bytes that follow a type: so many, and for
# each of its elements.
INT, PTR, ARRAY, STRUCT, UNION, ENUM, TYPEDEF, VOLATILE, CONST, RESTRICT = 1, 2, 3, 4, 5, 6, 8, 9, 10, 11
FUNC_PROTO, VAR, DATASEC, FLOAT, DECL_TAG, TYPE_TAG, ENUM64 = 13, 14, 15, 16, 17, 18, 19
EXTRA = {INT: 4, ARRAY: 12, VAR: 4, DECL_TAG: 4}
EACH = {STRUCT: 12, UNION: 12, ENUM: 8, FUNC_PROTO: 8, DATASEC: 12, ENUM64: 12}
SIZED = (INT, STRUCT, UNION, ENUM, FLOAT, ENUM64)
ALIASES = (TYPEDEF, VOLATILE, CONST, RESTRICT, TYPE_TAG)
HEADER = re.compile(rb"\x9f\xeb\x01\0[\x18-\x40]\0\0\0")

# Members whose C names are words of Rust get an underscore.
WORDS = set("""abstract as async await become box break const continue crate do dyn else enum extern false final
    fn for if impl in let loop macro match mod move mut override priv pub ref return self static struct
    super trait true try type typeof unsafe unsized use virtual where while yield bool char str""".split())

# These are in the BTF of no module that calls the drivers, and cannot change: NVMe-oF lays them out.
PROTOCOL = re.compile(r"nvme_completion(_nvme_result)?|nvme_rdma_cm_(req|rep|rej)|nvmf_disc_\w+")


def die(text):
    sys.exit(f"error: {text}")


def unzstd(data):
    try:
        # After an image there is more than a frame.
        done = subprocess.run(["zstd", "-dcq"], input=data, capture_output=True, check=False)
    except FileNotFoundError:
        die("zstd is missing: install it")
    return done.stdout


def read(path):
    try:
        return path.read_bytes()
    except OSError as error:
        return die(f"{path} cannot be read: {error.strerror}")


def unpack(path):
    """Returns the contents of a module."""
    data = read(path)
    by = {".xz": lzma.decompress, ".gz": gzip.decompress, ".zst": unzstd}
    try:
        return by[path.suffix](data) if path.suffix in by else data
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        return die(f"{path} cannot be unpacked: {error}")


def of_section(data):
    """Returns the BTF of an ELF file."""
    if data[:5] != b"\x7fELF\x02":
        return None
    at, = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3a)
    sections = [struct.unpack_from("<II4Q", data, at + n * size) for n in range(count)]
    strings = sections[names][4]
    for name, *_, offset, length in sections:
        if data.startswith(b".BTF\0", strings + name):
            return data[offset:offset + length]
    return None


def parts(data):
    """Yields a file and what is compressed in it, as kernels are within a file that boots."""
    yield data
    packed = {b"\x28\xb5\x2f\xfd": unzstd, b"\xfd7zXZ\0": lambda part: lzma.LZMADecompressor().decompress(part),
              b"\x1f\x8b\x08": lambda part: zlib.decompressobj(31).decompress(part)}
    for magic, unpacked in packed.items():
        at = -1
        while (at := data.find(magic, at + 1)) >= 0:
            try:
                yield unpacked(data[at:])
            except (lzma.LZMAError, zlib.error):
                pass


def of_image(path):
    """Returns the BTF of a kernel's image."""
    for data in parts(read(path)):
        if btf := of_section(data):
            return btf
        if found := HEADER.search(data):
            return data[found.start():]
    return die(f"{path} has no BTF")


class Btf:
    """The types of a file, and of the one that it adds to."""

    def __init__(self, data, base=None):
        self.base, self.data, self.named, self.enums = base, data, {}, []
        self.first, self.first_string = (base.end, base.end_string) if base else (1, 0)
        _, _, _, head, types, length, strings, size = struct.unpack_from("<HBBIIIII", data)
        self.strings = head + strings
        self.end_string = self.first_string + size
        self.places, at, end = [], head + types, head + types + length
        while at < end:
            name, info = struct.unpack_from("<II", data, at)
            kind, count = info >> 24 & 31, info & 0xffff
            number = self.first + len(self.places)
            if kind in (STRUCT, UNION) and name:
                self.named.setdefault((kind, self.string(name)), number)
            if kind in (ENUM, ENUM64):
                self.enums.append((self.string(name), number))
            self.places.append(at)
            at += 12 + EXTRA.get(kind, 0) + EACH.get(kind, 0) * count
        self.end = self.first + len(self.places)

    def string(self, at):
        if at < self.first_string:
            return self.base.string(at)
        at += self.strings - self.first_string
        return self.data[at:self.data.index(0, at)].decode()

    def type(self, number):
        """Returns its kind, name, size or type, number of elements, whether they may be bits, and its place."""
        if number < self.first:
            return self.base.type(number)
        at = self.places[number - self.first]
        name, info, size = struct.unpack_from("<III", self.data, at)
        return info >> 24 & 31, self.string(name), size, info & 0xffff, info >> 31, (self, at + 12)

    def bare(self, number):
        """Returns a type without its aliases."""
        while (found := self.type(number))[0] in ALIASES:
            number = found[2]
        return found

    def size(self, number):
        kind, _, size, _, _, (of, at) = self.bare(number)
        if kind == ARRAY:
            element, _, count = struct.unpack_from("<III", of.data, at)
            return count and count * self.size(element)
        return 8 if kind == PTR else size if kind in SIZED else 0

    def members(self, number):
        """Yields the name, the type and the offset in bytes of the members, which are no bits."""
        _, _, _, count, bits, (of, at) = self.bare(number)
        for n in range(count):
            name, member, offset = struct.unpack_from("<III", of.data, at + 12 * n)
            if not bits or not offset >> 24:
                yield of.string(name), member, (offset & 0xffffff if bits else offset) // 8

    def find(self, kind, name):
        return self.named.get((kind, name)) or (self.base.find(kind, name) if self.base else None)


def layouts(btf, number, rust):
    """Yields the name in Rust, the size and the members of a type, and of those without a name in it."""
    members, nested, nameless = [], 0, 0
    for name, member, offset in btf.members(number):
        kind, of, *_ = btf.type(member)
        if not of and kind in (STRUCT, UNION):
            nested += 1
            yield from layouts(btf, member, f"{rust}__bindgen_ty_{nested}")
        if not name:
            nameless += 1
            name = f"__bindgen_anon_{nameless}"
        members.append((name + "_" * (name in WORDS), offset, btf.size(member)))
    yield rust, btf.size(number), members


def constants(btf, number):
    """Yields the names and values of an enumeration."""
    kind, _, _, count, signed, (of, at) = btf.type(number)
    for n in range(count):
        if kind == ENUM64:
            name, low, high = struct.unpack_from("<III", of.data, at + 12 * n)
            value = low | high << 32
        else:
            name, value = struct.unpack_from("<Ii" if signed else "<II", of.data, at + 8 * n)
        yield of.string(name), value


def compare(text, modules, sources):
    """Returns what is to be true of the bindings, in the macros of bindings.rs, and what is said otherwise."""
    # Those that are only declared have nothing that could be compared.
    types = {name: STRUCT if kind == "struct" else UNION
             for kind, name in re.findall(r"(?m)^pub (struct|union) (?!\w*__bindgen_ty_)(\w+)\b"
                                     r"(?!<| {\s+(?:pub )?_(?:address|unused): )", text)}
    bound = {name: re.findall(r"(?m)^    pub (?!_bitfield_|__bindgen_(?:padding|align))(\w+):", body)
             for name, body in re.findall(r"(?ms)^pub (?:struct|union) (\w+) {(.*?)}", text)}
    values = set(re.findall(r"(?m)^pub const (\w+):", text))
    found, seen = {}, set()
    for module, btf in modules.items():
        for name, kind in types.items():
            number = btf.find(kind, name)
            if not number:
                continue
            seen.add(name)
            for rust, size, members in layouts(btf, number, name):
                what = f"{rust} of {module}"
                found.setdefault(f"same!(size_of::<{rust}>(), {size}", f"{what} has {size} bytes")
                for field, offset, size in members:
                    found.setdefault(f"member!({rust}, {field}, {offset}, {size}",
                                     f"{what}: {field} has {size} bytes at {offset}")
                # One that is in padding changes nothing of that.
                for field in sorted({*bound[rust]} - {field for field, *_ in members}):
                    found.setdefault(f"same!(offset_of!({rust}, {field}), usize::MAX", f"{what} has no {field}")
        for name, number in btf.enums:
            for constant, value in constants(btf, number):
                path = f"{name}_{constant}" if name else constant
                if path in values:
                    found.setdefault(f"same!({path}, {value}", f"{constant} of {module} is {value}")
    words = {word for path in sources for word in re.findall(r"\w+", Path(path).read_text())}
    if unknown := sorted(name for name in words & types.keys() - seen if not PROTOCOL.fullmatch(name)):
        die(f"{', '.join(modules)}: no BTF of {', '.join(unknown)}")
    return found


def main():
    image, paths, bindings, *sources = sys.argv[1:]
    paths = [Path(path) for path in [image, *paths.split()]]
    for path in paths:
        if not path.is_file():
            die(f"there is no {path} to compare the bindings of NVMe with: NVME_ROOT= is where the kernel is "
                "installed, with NVME= they are left out")
    image, *paths = paths
    base = Btf(of_image(image))
    modules = {}
    for path in paths:
        btf = of_section(unpack(path)) or die(f"{path} has no BTF")
        modules[path.name.partition(".")[0] + ".ko"] = Btf(btf, base)
    for fact, said in compare(Path(bindings).read_text(), modules or {"the kernel": base}, sources).items():
        print(f'{fact}, "{said}");')


if __name__ == "__main__":
    main()
