"""Keys for a deployment: a certificate authority, a server certificate, and a key pair for every SuperNode.

For a try-out on one machine, valid for a month and kept in one folder, the authority's key included. A real deployment
gets the server's certificate from an authority that the owners trust already, and each owner makes her own key pair
and hands out the public half (docs/flower.md).
"""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from flmarket.files import write_file

_DAYS = 30


@dataclass(frozen=True)
class ServerFiles:
    """Paths of the authority's certificate, the server's certificate and its key."""

    authority: Path
    certificate: Path
    key: Path


@dataclass(frozen=True)
class NodeKeys:
    """Paths of a SuperNode's private and public key."""

    private: Path
    public: Path


def server_files(folder: Path, *hosts: str) -> ServerFiles:
    """An authority and a certificate for these hosts, names or addresses, both new; by default for this machine."""
    hosts = hosts or ("127.0.0.1",)
    folder.mkdir(parents=True, exist_ok=True)
    authority_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    authority_name, server_name = _name("flmarket try-out authority"), _name(hosts[0])
    authority = (
        _builder(authority_name, authority_name, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), *map(_alternative, hosts)])
    server = (
        _builder(server_name, authority_name, server_key.public_key())
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    files = ServerFiles(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    files.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    files.certificate.write_bytes(server.public_bytes(serialization.Encoding.PEM))
    write_file(files.key, _private_bytes(server_key, serialization.PrivateFormat.PKCS8), private=True)
    return files


def node_keys(folder: Path, name: str) -> NodeKeys:
    """A key pair as `ssh-keygen -t ecdsa -b 384` makes it."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    keys = NodeKeys(folder / name, folder / f"{name}.pub")
    write_file(keys.private, _private_bytes(key, serialization.PrivateFormat.OpenSSH), private=True)
    keys.public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )
    return keys


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    since, until = now - datetime.timedelta(hours=1), now + datetime.timedelta(days=_DAYS)
    return builder.not_valid_before(since).not_valid_after(until)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=signs_certificates, crl_sign=signs_certificates, encipher_only=False,
        decipher_only=False,
    )  # fmt: skip


def _private_bytes(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
