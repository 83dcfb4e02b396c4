"""Creates a private certificate authority and a certificate for a loopback server, with the openssl command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from servers.require import require

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Certificates:
    """Files in PEM format."""

    ca: Path
    certificate: Path
    key: Path

    def settings(self) -> dict[str, str]:
        """Return the lines for a server's configuration file."""
        return {
            "tls-cert-file": f'"{self.certificate}"',
            "tls-key-file": f'"{self.key}"',
            "tls-ca-cert-file": f'"{self.ca}"',
            "tls-auth-clients": "no",
            "tls-replication": "yes",
        }


def make_certificates(folder: Path) -> Certificates:
    """Create certificates for 127.0.0.1 and localhost that are valid for one day."""
    program = require("openssl")
    folder.mkdir(parents=True, exist_ok=True)

    def openssl(command: str, *arguments: str) -> None:
        subprocess.run([program, *command.split(), *arguments], cwd=folder, check=True, capture_output=True)

    new_key = "-newkey rsa:2048 -nodes"
    # With what Python 3.13 and later insist on by default (VERIFY_X509_STRICT): key identifiers and what a key is for.
    (folder / "server.ext").write_text(
        "subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\n"
        "subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
    )
    usage = "keyUsage=critical,keyCertSign,cRLSign"
    openssl(f"req -x509 {new_key} -days 1 -addext {usage} -keyout ca.key -out ca.crt -subj", "/CN=tampu test authority")
    openssl(f"req -new {new_key} -keyout server.key -out server.csr -subj", "/CN=localhost")
    openssl(
        "x509 -req -days 1 -in server.csr -CA ca.crt -CAkey ca.key -set_serial 1 -extfile server.ext -out server.crt"
    )
    return Certificates(folder / "ca.crt", folder / "server.crt", folder / "server.key")
