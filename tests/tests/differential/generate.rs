//! Random programs.

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use thallus_tests::calls::Family;
use thallus_tests::differential::program::{
    Control, End, Flag, How, Op, PollBy, Program, ReceiveBy, SendBy, Setting, SocketOption, Step,
};

/// Programs of up to `steps` steps.
pub(crate) fn programs(steps: usize) -> impl Strategy<Value = Program> {
    (setting(), vec(step(), 1..=steps)).prop_map(|(setting, steps)| Program { setting, steps })
}

fn setting() -> impl Strategy<Value = Setting> {
    let families = match std::env::var("DIFFERENTIAL_FAMILY") {
        Ok(name) => Just(Family::named(&name).expect("DIFFERENTIAL_FAMILY names a family")).boxed(),
        Err(_) => prop_oneof![
            6 => Just(Family::V4),
            1 => Just(Family::V6),
            1 => Just(Family::Mapped),
            4 => Just(Family::Unix),
        ]
        .boxed(),
    };
    // Most connections have left TCP before the first step; some leave it in the middle.
    let warm_up = prop_oneof![1 => Just(0), 1 => 1u32..6, 4 => Just(12u32)];
    (
        families,
        prop_oneof![4 => Just(1), 1 => Just(4u32)],
        option::weighted(0.3, select(vec![0u32, 200])),
        vec(warm_up, 1..=3),
        prop::bool::weighted(0.9),
    )
        .prop_map(|(family, upgrade_after, spin, warm_up, without_delay)| Setting {
            family,
            upgrade_after,
            spin,
            warm_up,
            without_delay,
        })
}

fn step() -> impl Strategy<Value = Step> {
    let end = prop_oneof![Just(End::Server), Just(End::Client)];
    (end, 0..3usize, op()).prop_map(|(end, process, op)| Step { end, process, op })
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        30 => send(),
        30 => receive(),
        10 => poll(),
        3 => Just(Op::NewSet),
        14 => control(),
        14 => wait(),
        3 => (fd(), select(vec![How::Reading, How::Writing, How::Both])).prop_map(|(fd, how)| Op::Shutdown { fd, how }),
        3 => fd().prop_map(|fd| Op::Close { fd }),
        2 => fd().prop_map(|fd| Op::Dup { fd }),
        1 => (fd(), fd()).prop_map(|(fd, onto)| Op::Dup2 { fd, onto }),
        4 => options(),
        3 => (fd(), any::<bool>()).prop_map(|(fd, on)| Op::Nonblocking { fd, on }),
        6 => fd().prop_map(|fd| Op::Unread { fd }),
        1 => fd().prop_map(|fd| Op::Unsent { fd }),
        1 => fd().prop_map(|fd| Op::Addresses { fd }),
        3 => (fd(), small()).prop_map(|(fd, len)| Op::SendFile { fd, len }),
        1 => (fd(), 1..20_000usize).prop_map(|(fd, len)| Op::Splice { fd, len }),
        12 => started().prop_map(|op| Op::Start { op: Box::new(op) }),
        2 => Just(Op::Interrupt),
        5 => fd().prop_map(|fd| Op::Drain { fd }),
        2 => Just(Op::Fork),
        1 => Just(Op::Exit),
        1 => Just(Op::Kill),
    ]
}

/// A choice among descriptors; now and then the one closed last.
fn fd() -> impl Strategy<Value = i32> {
    prop_oneof![30 => 0..6i32, 1 => Just(-1)]
}

fn small() -> impl Strategy<Value = usize> {
    prop_oneof![2 => 0..4usize, 6 => 1..200usize, 4 => 200..20_000usize, 1 => 20_000..60_000usize]
}

fn length() -> impl Strategy<Value = usize> {
    prop_oneof![30 => small(), 1 => 60_000..6_000_000usize]
}

fn send() -> impl Strategy<Value = Op> {
    let by = select(vec![
        SendBy::Send,
        SendBy::Write,
        SendBy::Sendto,
        SendBy::Writev,
        SendBy::Sendmsg,
        SendBy::Sendmmsg,
        SendBy::More,
        SendBy::Corked,
    ]);
    (fd(), length(), by, subsequence(vec![Flag::DontWait, Flag::NoSignal], 0..=2))
        .prop_map(|(fd, len, by, flags)| Op::Send { fd, len, by, flags })
}

fn receive() -> impl Strategy<Value = Op> {
    let by = select(vec![
        ReceiveBy::Recv,
        ReceiveBy::Read,
        ReceiveBy::Recvfrom,
        ReceiveBy::Readv,
        ReceiveBy::Recvmsg,
        ReceiveBy::Recvmmsg,
        ReceiveBy::RecvChk,
        ReceiveBy::ReadChk,
    ]);
    let flags = prop_oneof![
        4 => Just(Vec::new()),
        3 => Just(vec![Flag::DontWait]),
        1 => Just(vec![Flag::Peek]),
        1 => Just(vec![Flag::WaitAll]),
        1 => Just(vec![Flag::Trunc]),
        1 => subsequence(vec![Flag::DontWait, Flag::Peek, Flag::Trunc, Flag::WaitAll], 0..=4),
    ];
    (fd(), length(), by, flags).prop_map(|(fd, len, by, flags)| Op::Receive { fd, len, by, flags })
}

fn poll() -> impl Strategy<Value = Op> {
    let events = prop_oneof![
        3 => Just(libc::POLLIN | libc::POLLOUT | libc::POLLPRI | libc::POLLRDHUP | libc::POLLRDNORM | libc::POLLWRNORM),
        2 => Just(libc::POLLIN),
        1 => Just(libc::POLLOUT),
        1 => Just(libc::POLLRDHUP),
        1 => Just(0),
    ];
    (select(vec![PollBy::Poll, PollBy::Ppoll, PollBy::Select]), events)
        .prop_map(|(by, events)| Op::Poll { by, events })
}

fn control() -> impl Strategy<Value = Op> {
    let how = prop_oneof![6 => Just(Control::Add), 3 => Just(Control::Modify), 1 => Just(Control::Delete)];
    let wanted = prop_oneof![
        4 => Just(libc::EPOLLIN),
        2 => Just(libc::EPOLLIN | libc::EPOLLRDHUP),
        2 => Just(libc::EPOLLIN | libc::EPOLLOUT),
        1 => Just(libc::EPOLLOUT),
        2 => Just(libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP),
        1 => Just(0),
    ];
    let trigger = prop_oneof![
        4 => Just(0),
        4 => Just(libc::EPOLLET),
        2 => Just(libc::EPOLLONESHOT),
        1 => Just(libc::EPOLLET | libc::EPOLLONESHOT),
    ];
    (fd(), fd(), how, wanted, trigger).prop_map(|(set, fd, how, wanted, trigger)| Op::Control {
        set,
        fd,
        how,
        events: (wanted | trigger).cast_unsigned(),
    })
}

fn wait() -> impl Strategy<Value = Op> {
    (0..4i32).prop_map(|set| Op::Wait { set })
}

fn options() -> impl Strategy<Value = Op> {
    use SocketOption::{Error, KeepAlive, Linger, NoDelay, ReceiveTimeout, Type, UrgentInline};
    let all = select(vec![Error, Type, NoDelay, KeepAlive, UrgentInline, ReceiveTimeout, Linger]);
    prop_oneof![
        3 => (fd(), all).prop_map(|(fd, option)| Op::GetOption { fd, option }),
        2 => (fd(), select(vec![NoDelay, KeepAlive, UrgentInline]), 0..2i32)
            .prop_map(|(fd, option, value)| Op::SetOption { fd, option, value }),
        1 => (fd(), select(vec![0, 20])).prop_map(|(fd, value)| Op::SetOption { fd, option: ReceiveTimeout, value }),
        1 => fd().prop_map(|fd| Op::SetOption { fd, option: Linger, value: 0 }),
    ]
}

fn started() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => receive(),
        2 => poll(),
        4 => wait(),
        1 => (fd(), 200_000..8_000_000usize, select(vec![SendBy::Send, SendBy::Write, SendBy::Sendmsg, SendBy::Writev]))
            .prop_map(|(fd, len, by)| Op::Send { fd, len, by, flags: Vec::new() }),
    ]
}
