"""The channel: fragments, queues, and what is not a message."""

from __future__ import annotations

import socket
from typing import Any

import msgpack
import pytest

from attnix.drivers.channel import MAX_CHANNEL_MESSAGE_BYTES, BadMessage, Channel, ChannelClosed, channel_pair
from attnix.drivers.protocol import LAST, MORE, PACKET_BYTES


@pytest.mark.parametrize("n_bytes", [0, 1, 255, *range(PACKET_BYTES - 12, PACKET_BYTES + 4), 2 * PACKET_BYTES, 300_000])
def test_every_length_around_a_packet_arrives_whole(n_bytes: int) -> None:
    ours, theirs = channel_pair()
    message = ["exec", bytes(i % 251 for i in range(n_bytes)), [b"", "text", -1, 2.5, None]]
    assert ours.send(message)
    assert theirs.recv() == message
    assert ours.send(["next"])
    assert theirs.recv() == ["next"]
    ours.close()
    assert theirs.recv() is None
    theirs.close()


def test_a_full_socket_queues_and_never_waits() -> None:
    ours, theirs = channel_pair()
    ours.setblocking(False)
    theirs.setblocking(False)
    message = ["exec", bytes(1_000_000)]
    n_sent = 1
    while ours.send(message):
        n_sent += 1
        assert n_sent < 1000, "the socket takes everything: this test needs one that fills up"
    assert ours.bytes_queued > 0
    assert not ours.send(["small"])  # behind the big ones, in order
    received: list[list[Any]] = []
    while not ours.flush():
        received += theirs.recv_ready()
    while not received or received[-1] != ["small"]:
        received += theirs.recv_ready()
    assert received == [message] * n_sent + [["small"]]
    assert ours.bytes_queued == 0
    assert theirs.recv_ready() == []
    assert not theirs.eof
    ours.close()
    assert theirs.recv_ready() == []
    assert theirs.eof
    theirs.close()


@pytest.mark.parametrize(
    ("packets", "problem"),
    [
        ([b"\x02\x91\xa1x"], "begins with byte 2"),
        ([LAST], "not MessagePack"),
        ([LAST + b"\xc1"], "not MessagePack"),
        ([LAST + b"\x92\xa1x"], "not MessagePack"),  # an array of two with one item
        ([LAST + b"\x91\xa1x\x00"], "not MessagePack"),  # something behind the message
        ([LAST + b"\x91\xa1\xff"], "not MessagePack"),  # a string that is not UTF-8
        ([LAST + b"\x90"], "begins with its verb"),
        ([LAST + b"\x91\x01"], "begins with its verb"),
        ([LAST + b"\xa1x"], "begins with its verb"),
        ([MORE + b"\x92\xa1x", b"\x07\x01"], "begins with byte 7"),
        ([LAST + bytes(PACKET_BYTES)], "longer than"),
    ],
)
def test_what_is_no_message_is_refused(packets: list[bytes], problem: str) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(theirs)
    for packet in packets:
        ours.send(packet)
    with pytest.raises(BadMessage, match=problem):
        channel.recv()
    channel.close()
    ours.close()


def test_a_message_without_end_is_cut_off() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(theirs)
    packet = MORE + bytes(PACKET_BYTES - 1)
    with pytest.raises(BadMessage, match="longer than"):
        for _ in range(2 * MAX_CHANNEL_MESSAGE_BYTES // PACKET_BYTES):
            ours.send(packet)
            channel._recv_packet()
    channel.close()
    ours.close()


def test_a_message_that_could_not_be_received_is_not_sent() -> None:
    ours, theirs = channel_pair()
    with pytest.raises(BadMessage):
        ours.send(["exec", bytes(MAX_CHANNEL_MESSAGE_BYTES)])
    ours.send(["after"])
    assert theirs.recv() == ["after"]
    ours.close()
    theirs.close()


def test_sending_to_a_closed_peer_says_so() -> None:
    ours, theirs = channel_pair()
    theirs.close()
    with pytest.raises(ChannelClosed):
        ours.send(["x"])
    assert ours.bytes_queued == 0
    assert ours.recv() is None
    ours.close()


def test_a_peer_that_dies_with_unread_input_reads_as_end_of_file() -> None:
    ours, theirs = channel_pair()
    ours.send(["unread"])
    theirs.close()
    assert ours.recv() is None
    ours.close()


def test_the_bytes_on_the_wire() -> None:
    """One byte, then MessagePack: any other implementation can do the same."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(ours)
    channel.send(("probe", 1))
    assert theirs.recv(100) == b"\x00" + b"\x92\xa5probe\x01"
    channel.send(["x", bytes(PACKET_BYTES)])
    first, second = theirs.recv(1 << 20), theirs.recv(1 << 20)
    assert (len(first), first[:1], second[:1]) == (PACKET_BYTES, MORE, LAST)
    assert msgpack.unpackb(first[1:] + second[1:]) == ["x", bytes(PACKET_BYTES)]
    channel.close()
    theirs.close()
