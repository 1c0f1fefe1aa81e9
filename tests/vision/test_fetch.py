"""Images from other machines: what is fetched, and what is refused. In the tests the other machine is this one, whose
address is not public.
"""

import socket
import subprocess
import threading
import time

import pytest
from small_site import SmallSite, moved, reply

from moeflux_mlx.cli.serving import defaults_of
from moeflux_mlx.errors import RequestError
from moeflux_mlx.serve import parser
from moeflux_mlx.vision import fetch as fetching
from moeflux_mlx.vision.fetch import fetch, is_public
from moeflux_mlx.vision.sources import image_bytes

HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"
PUBLIC = ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1"]
OTHERS = [
    *("127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "169.254.169.254"),
    *("224.0.0.1", "239.1.1.1", "255.255.255.255", "198.18.0.1", "192.0.2.1", "240.0.0.1"),
    *("::1", "::", "fe80::1", "fe80::1%2", "fc00::1", "fd12::1", "fec0::1", "ff02::1", "2001:db8::1", "4000::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::1", "::127.0.0.1"),
]


@pytest.fixture
def site():
    with SmallSite() as site:
        yield site


@pytest.fixture
def names(monkeypatch):
    """Returns addresses of names. If a name has several lists, each look-up takes the next one."""
    known, real = {}, socket.getaddrinfo

    def look_up(host, port, *args, **options):
        if host not in known:
            return real(host, port, *args, **options)
        addresses = known[host].pop(0) if isinstance(known[host][0], list) else known[host]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


def get(url, seconds=60.0, may_connect=(HERE,)):
    return fetch(url, time.monotonic() + seconds, lambda address: address in may_connect)


def test_addresses_that_are_public():
    assert all(map(is_public, PUBLIC))
    assert [address for address in OTHERS if is_public(address)] == []


def test_a_file_is_fetched_also_after_a_redirect(site, names):
    names["pictures.test"] = [HERE]
    site.answers = {
        "/a%20b%C3%BC.png?x=1&y=%20": moved("two/down?"),
        "/two/down": moved(f"http://pictures.test:{site.port}/three", "308 Permanent Redirect"),
        "/three": moved("/a.png", "303 See Other"),
        "/a.png": reply(b"picture", **{"Content-Length": 7}),
        "/": moved("/a%20b%C3%BC.png?x=1&y=%20"),
    }
    assert get(f"{site.url}/a bü.png?x=1&y=%20#part") == b"picture"
    here, there = f"{HERE}:{site.port}", f"pictures.test:{site.port}"
    assert [host for _, host in site.asked] == [here, here, there, there]
    with pytest.raises(RequestError, match="redirected more than 3 times"):
        get(site.url)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:{}/", "http://u:p@localhost:{}/", "http://2130706433:{}/", "http://[::ffff:7f00:1]:{}/"]
)
def test_files_on_this_machine_are_refused(site, url):
    with pytest.raises(RequestError, match="not at a public address; send a data: URL"):
        fetch(url.format(site.port), time.monotonic() + 60)
    assert not site.asked


@pytest.mark.parametrize("target", ["http://{1}:{0}/secret", "//{1}:{0}/secret", "file:///etc/passwd", "ftp://{2}/"])
def test_a_redirect_to_another_machine_is_refused(site, target):
    site.answers = {"/": moved(target.format(site.port, ELSEWHERE, HERE)), "/secret": reply(b"secret")}
    with pytest.raises(RequestError, match="not at a public address|is not at http"):
        get(site.url)
    assert [path for path, _ in site.asked] == ["/"]


def test_one_address_that_is_not_public_is_enough(site, names):
    names["mixed.test"] = [HERE, ELSEWHERE]
    with pytest.raises(RequestError, match="mixed.test is not at a public address"):
        get(f"http://mixed.test:{site.port}/")
    assert not site.asked


def test_a_name_is_looked_up_only_once(site, names):
    names["two.test"] = [[HERE], [ELSEWHERE]]
    site.answers["/a.png"] = reply(b"picture")
    assert get(f"http://two.test:{site.port}/a.png") == b"picture"
    assert names["two.test"] == [[ELSEWHERE]]


def test_a_look_up_takes_part_of_the_time(site, monkeypatch):
    """The system gives no limit for it."""
    go = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: go.wait(10) and [])
    began = time.monotonic()
    with pytest.raises(RequestError, match="the image cannot be fetched: it took too long"):
        get(f"http://slow.test:{site.port}/a.png", 0.1)
    go.set()
    assert time.monotonic() - began < 5


def test_the_next_address_is_tried_if_one_does_not_answer(site, names):
    with socket.socket() as deaf:
        deaf.bind((HERE, 0))
        with pytest.raises(RequestError, match="cannot be fetched: .*refused"):
            get(f"http://{HERE}:{deaf.getsockname()[1]}/")
    names["three.test"] = ["::1", HERE]
    site.answers["/a.png"] = reply(b"picture")
    assert get(f"http://three.test:{site.port}/a.png", may_connect=("::1", HERE)) == b"picture"


@pytest.mark.parametrize("length", [{}, {"Content-Length": 1 << 40}])
def test_reading_ends_if_a_file_is_too_large(site, monkeypatch, length):
    monkeypatch.setattr(fetching, "FILE_BYTES", 100_000)

    def more():
        """Yields more bytes than the system buffers."""
        yield reply(**length)
        for _ in range(500):
            yield bytes(1 << 16)

    site.answers["/"] = more
    with pytest.raises(RequestError, match="more than 100000 bytes"):
        get(site.url)
    assert not site.ended


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\n", reply(), reply(**{"Content-Length": 1000})])
def test_reading_ends_where_a_file_comes_too_slowly(site, start):
    """Bytes arrive for at most a minute. A limit for each piece alone would not end the reading."""

    def drip():
        yield start
        for _ in range(1000):
            time.sleep(0.06)
            yield b"x"

    site.answers["/"] = drip
    with pytest.raises(RequestError, match="cannot be fetched: it took too long"):
        get(site.url, 0.2)
    assert not site.ended


@pytest.mark.parametrize("answer", [b"", b"\x00\xff\n\n", reply(status="500 Oh"), moved(""), moved("http://[/")])
def test_answers_without_a_file_are_refused(site, answer):
    site.answers["/"] = answer
    with pytest.raises(RequestError, match="the image cannot be fetched: ."):
        get(site.url)


@pytest.mark.parametrize(
    "url", ["http://", "http://:80", "http://a:b/", "http://[x]/", "http://a b/", f"http://{'a' * 70}/"]
)
def test_damaged_urls_are_refused(url):
    with pytest.raises(RequestError, match="the image cannot be fetched: ."):
        get(url)


def test_a_certificate_must_be_trusted_and_match_the_name(tmp_path, monkeypatch, names):
    made, name = tmp_path / "made.pem", "pictures.test"
    command = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN={name} -days 2"
    more = ["-addext", f"subjectAltName=DNS:{name}", "-keyout", made, "-out", tmp_path / "certificate.pem"]
    try:
        subprocess.run([*command.split(), *more], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl")
    made.write_bytes(made.read_bytes() + (tmp_path / "certificate.pem").read_bytes())
    names.update({name: [HERE], "other.test": [HERE]})
    with SmallSite({"/a.png": reply(b"picture")}, made) as site:
        with pytest.raises(RequestError, match="certificate verify failed"):
            get(f"https://{name}:{site.port}/a.png")
        monkeypatch.setenv("SSL_CERT_FILE", str(made))
        assert get(f"https://{name}:{site.port}/a.png") == b"picture"
        with pytest.raises(RequestError, match="certificate is not valid for 'other.test'"):
            get(f"https://other.test:{site.port}/a.png")


def test_nothing_is_fetched_unless_the_server_allows_it(tmp_path):
    with pytest.raises(RequestError, match="serve --allow-image-urls"):
        image_bytes("https://example.com/a.png", None)

    for more, wanted in ([], None), (["--allow-image-urls"], fetch):
        assert defaults_of(parser().parse_args(["--model", "m", *more]), {}, tmp_path).fetch is wanted
