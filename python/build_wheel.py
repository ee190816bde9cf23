"""Builds the wheel of the Python package: python3 build_wheel.py LIBRARY FOLDER [VERSION]

LIBRARY is a libgpucr.so that was built on this host. The wheel is put into FOLDER, and its path is printed. That needs
nothing but Python; of the same files comes the same wheel.
"""

import base64
import hashlib
import os
import pathlib
import re
import sys
import zipfile

# The library needs the C library of the host on which it was built, or a newer one.
GLIBC = os.confstr("CS_GNU_LIBC_VERSION").split()[1].replace(".", "_")
TAG = f"py3-none-manylinux_{GLIBC}_x86_64"
METADATA = """\
Metadata-Version: 2.1
Name: gpucr
Version: {version}
Summary: A CUDA program that saves itself: checkpoint and restore with gpucr
License: MIT OR Apache-2.0
License-File: LICENSE-MIT
License-File: LICENSE-APACHE
Requires-Python: >=3.8
Classifier: Operating System :: POSIX :: Linux
"""
LICENSES = ["LICENSE-MIT", "LICENSE-APACHE"]
WHEEL = f"""\
Wheel-Version: 1.0
Generator: gpucr
Root-Is-Purelib: false
Tag: {TAG}
"""


def version():
    """That of the workspace."""
    manifest = pathlib.Path(__file__).resolve().parent.parent / "Cargo.toml"
    found = re.search(r'^version = "([^"]+)"', manifest.read_text(), re.MULTILINE)
    return found.group(1)


def build(library, folder, version):
    info = f"gpucr-{version}.dist-info"
    package = pathlib.Path(__file__).resolve().parent / "gpucr"
    files = [(f"gpucr/{path.name}", path.read_bytes()) for path in sorted(package.glob("*.py"))]
    files.append(("gpucr/libgpucr.so", pathlib.Path(library).read_bytes()))
    files.append((f"{info}/METADATA", METADATA.format(version=version).encode()))
    files.append((f"{info}/WHEEL", WHEEL.encode()))
    root = package.parent.parent
    for name in LICENSES:
        files.append((f"{info}/{name}", (root / name).read_bytes()))
    record = ""
    for name, data in files:
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    files.append((f"{info}/RECORD", (record + f"{info}/RECORD,,\n").encode()))
    wheel = pathlib.Path(folder) / f"gpucr-{version}-{TAG}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files:
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            archive.writestr(entry, data)
    return wheel


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    print(build(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) == 4 else version()))
