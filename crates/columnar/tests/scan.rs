//! The scan protocol: bytes that round trip, bytes that are made up, and a simulated pair.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use proptest::prelude::*;
use thallus_columnar::scan::{
    Action, Client, Code, CursorId, Failure, Frame, FrameLimits, HEADER, Header, RequestId, ScanError,
    Server, ServerLimits,
};

const START: Duration = Duration::ZERO;

fn parse(bytes: &[u8]) -> Result<(Frame, u64), ScanError> {
    let (header, rest) = bytes.split_first_chunk::<HEADER>().ok_or(ScanError::Length)?;
    let header = Header::parse(header, &FrameLimits::default())?;
    let head = rest.get(..header.head).ok_or(ScanError::Length)?;
    Ok((Frame::parse(&header, head)?, header.tail))
}

fn any_failure() -> impl Strategy<Value = Failure> {
    let code = prop_oneof![
        Just(Code::Query),
        Just(Code::Dataset),
        Just(Code::Limit),
        Just(Code::Cancelled),
        Just(Code::Expired),
        Just(Code::Other(0)),
        (100..u16::MAX).prop_map(Code::Other),
    ];
    (code, ".{0,40}").prop_map(|(code, message)| Failure { code, message })
}

fn any_frame() -> impl Strategy<Value = Frame> {
    let cursor = || any::<[u8; 16]>().prop_map(CursorId);
    let request = || any::<u32>().prop_map(RequestId);
    prop_oneof![
        any::<(u16, u16)>().prop_map(|(lowest, highest)| Frame::Hello { lowest, highest }),
        (request(), ".{0,20}", ".{0,60}").prop_map(|(request, dataset, sql)| Frame::Init {
            request,
            dataset,
            sql
        }),
        (cursor(), any::<u32>()).prop_map(|(cursor, credits)| Frame::Iterate { cursor, credits }),
        cursor().prop_map(|cursor| Frame::Finalize { cursor }),
        cursor().prop_map(|cursor| Frame::Cancel { cursor }),
        Just(Frame::AcceptLoans),
        (cursor(), any::<(u64, u64, [u8; 32])>()).prop_map(|(cursor, (number, bytes, handle))| Frame::Lent {
            cursor,
            number,
            bytes,
            handle
        }),
        (request(), cursor()).prop_map(|(request, cursor)| Frame::Opened { request, cursor }),
        (request(), any_failure()).prop_map(|(request, failure)| Frame::Refused { request, failure }),
        (cursor(), any::<u64>()).prop_map(|(cursor, number)| Frame::Batch { cursor, number }),
        (cursor(), any::<u64>(), proptest::option::of(0..=1000_u16))
            .prop_map(|(cursor, rows, permille)| Frame::Progress { cursor, rows, permille }),
        (cursor(), any::<u64>()).prop_map(|(cursor, batches)| Frame::Done { cursor, batches }),
        (cursor(), any_failure()).prop_map(|(cursor, failure)| Frame::Failed { cursor, failure }),
        cursor().prop_map(|cursor| Frame::Finalized { cursor }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn frames_round_trip(frame in any_frame(), tail in 0..1_u64 << 32) {
        let tail = if matches!(frame, Frame::Opened { .. } | Frame::Batch { .. } | Frame::Lent { .. }) { tail } else { 0 };
        let bytes = frame.encode(tail).unwrap();
        prop_assert_eq!(parse(&bytes).unwrap(), (frame, tail));
        // Neither more nor less is taken for it.
        prop_assert!((0..bytes.len()).all(|end| parse(&bytes[..end]).is_err()));
    }

    /// What is accepted is exactly what would have been written.
    #[test]
    fn tampered_frames_are_refused_or_canonical(
        frame in any_frame(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = frame.encode(0).unwrap();
        for (place, byte) in changes {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        if let Ok((frame, tail)) = parse(&bytes) {
            let written = frame.encode(tail).unwrap();
            prop_assert_eq!(&bytes[..written.len()], &written[..]);
        }
    }

    #[test]
    fn noise_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..80), kind in 0..26_u8) {
        let _ = parse(&bytes);
        let head = (bytes.len() as u32).to_le_bytes();
        let _ = parse(&[&[kind, 0, 0, 0][..], &head, &[0; 8], &bytes].concat());
    }

    /// Two ends, with frames under way in both directions and every choice left to chance: neither is ever surprised, no more
    /// batches come than were allowed, and in the end neither has a cursor.
    #[test]
    fn a_pair_agrees(choices in proptest::collection::vec(any::<(u8, u8)>(), 0..400)) {
        let mut pair = Pair::default();
        for (choice, which) in choices {
            pair.step(choice, usize::from(which));
        }
        pair.finish();
    }
}

#[derive(Default)]
struct Pair {
    client: Client,
    server: Option<Server>,
    to_server: VecDeque<Frame>,
    to_client: VecDeque<Frame>,
    opening: Vec<RequestId>,
    /// By what the client has been told: those not finalized.
    open: Vec<CursorId>,
    /// Running by what the server knows.
    running: Vec<CursorId>,
    allowed: HashMap<CursorId, u64>,
    received: HashMap<CursorId, u64>,
    last_cursor: u8,
    now: Duration,
}

impl Pair {
    fn server(&mut self) -> &mut Server {
        let limits = ServerLimits { cursors: 3, idle: Duration::from_secs(10) };
        self.server.get_or_insert_with(|| Server::new(limits))
    }

    fn step(&mut self, choice: u8, which: usize) {
        self.now += Duration::from_secs(1);
        let now = self.now;
        let open = (!self.open.is_empty()).then(|| which % self.open.len());
        let running = (!self.running.is_empty()).then(|| self.running[which % self.running.len()]);
        match choice % 12 {
            0 => {
                let frame = self.client.init("tpch", "select 1").1;
                self.to_server.push_back(frame);
            }
            1 => {
                if let Some(index) = open {
                    let (cursor, credits) = (self.open[index], which as u32 % 5);
                    *self.allowed.entry(cursor).or_default() += u64::from(credits);
                    let frame = self.client.iterate(cursor, credits).unwrap();
                    self.to_server.push_back(frame);
                }
            }
            2 => {
                if let Some(index) = open {
                    let frame = self.client.cancel(self.open[index]).unwrap();
                    self.to_server.push_back(frame);
                }
            }
            3 => {
                if let Some(index) = open {
                    let cursor = self.open.remove(index);
                    let frame = self.client.finalize(cursor).unwrap();
                    self.to_server.push_back(frame);
                    assert_eq!(self.client.iterate(cursor, 1), Err(ScanError::UnknownCursor(cursor)));
                }
            }
            4 => {
                if let Some(request) = self.opening.pop() {
                    let frame = if which.is_multiple_of(4) {
                        let failure = Failure { code: Code::Query, message: "no such table".to_owned() };
                        self.server().refused(request, failure).unwrap()
                    } else {
                        self.last_cursor += 1;
                        let cursor = CursorId([self.last_cursor; 16]);
                        self.running.push(cursor);
                        self.server().opened(request, cursor, now).unwrap()
                    };
                    self.to_client.push_back(frame);
                }
            }
            5 => {
                if let Some(cursor) = running {
                    let frame = self.server().done(cursor);
                    self.to_client.extend(frame);
                }
            }
            6 => {
                if let Some(cursor) = running {
                    let frame = self.server().progress(cursor, 1, None);
                    self.to_client.extend(frame);
                }
            }
            7 => {
                if let Some(cursor) = running {
                    let frame = self.server().batch(cursor, now);
                    self.to_client.extend(frame);
                }
            }
            8 => {
                let frames = self.server().expired(now);
                self.to_client.extend(frames.into_iter().map(|(_, frame)| frame));
            }
            9 | 10 => self.deliver_to_server(),
            _ => self.deliver_to_client(),
        }
    }

    fn deliver_to_server(&mut self) {
        let now = self.now;
        let Some(frame) = self.to_server.pop_front() else { return };
        match self.server().received(frame, now).unwrap() {
            Action::Open { request, .. } => self.opening.push(request),
            Action::Interrupt(cursor) => {
                let failure = Failure { code: Code::Cancelled, message: String::new() };
                let frame = self.server().failed(cursor, failure);
                self.to_client.push_back(frame.unwrap());
            }
            Action::Close(cursor, frame) => {
                self.running.retain(|running| *running != cursor);
                self.to_client.push_back(frame);
            }
            Action::Refuse(frame) => {
                assert_eq!(self.server().cursors().count() + self.opening.len(), 3);
                self.to_client.push_back(frame);
            }
            Action::Resume(_) | Action::None => {}
        }
    }

    fn deliver_to_client(&mut self) {
        let Some(frame) = self.to_client.pop_front() else { return };
        self.client.received(&frame).unwrap();
        match frame {
            Frame::Opened { cursor, .. } => self.open.push(cursor),
            Frame::Batch { cursor, .. } => {
                let received = self.received.entry(cursor).or_default();
                *received += 1;
                assert!(*received <= self.allowed[&cursor]);
            }
            _ => {}
        }
    }

    fn finish(mut self) {
        loop {
            while !self.to_server.is_empty() || !self.to_client.is_empty() || !self.opening.is_empty() {
                self.deliver_to_server();
                self.step(4, 1);
                self.deliver_to_client();
            }
            if self.open.is_empty() {
                break;
            }
            self.step(3, 0);
        }
        assert_eq!(self.server().cursors().count(), 0);
        assert!(
            (1..=self.last_cursor).all(|cursor| { self.client.finalize(CursorId([cursor; 16])).is_err() })
        );
    }
}

#[test]
fn ends_without_a_common_version_part() {
    assert_eq!(Frame::hello().check_hello(), Ok(()));
    let newer = Frame::Hello { lowest: 3, highest: 9 };
    assert_eq!(newer.check_hello(), Err(ScanError::Version { lowest: 3, highest: 9 }));
    let cursor = CursorId([0; 16]);
    assert_eq!(Frame::Cancel { cursor }.check_hello(), Err(ScanError::Unexpected));
    let http = parse(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert_eq!(http, Err(ScanError::Kind(b'G')));
}

#[test]
fn a_frame_says_its_size_before_it_is_read() {
    let mut header: [u8; HEADER] = Frame::hello().encode(0).unwrap()[..HEADER].try_into().unwrap();
    header[4..8].fill(0xff);
    let limits = FrameLimits::default();
    assert!(matches!(Header::parse(&header, &limits), Err(ScanError::TooLarge { limit: 1_048_576, .. })));
    let cursor = CursorId([0; 16]);
    let tail = Frame::Cancel { cursor }.encode(1).unwrap();
    assert_eq!(parse(&tail), Err(ScanError::TooLarge { actual: 1, limit: 0 }));
}

#[test]
fn a_long_message_is_told_in_part() {
    let failure = Failure { code: Code::Query, message: "aä€".repeat(1 << 20) };
    let (request, cursor) = (RequestId(1), CursorId([0; 16]));
    for frame in [Frame::Refused { request, failure: failure.clone() }, Frame::Failed { cursor, failure }] {
        let (Frame::Refused { failure, .. } | Frame::Failed { failure, .. }, _) =
            parse(&frame.encode(0).unwrap()).unwrap()
        else {
            panic!("another frame");
        };
        assert!(failure.message.starts_with("aä€aä€") && failure.message.ends_with(" …"));
    }
}

#[test]
fn a_server_that_sends_what_was_not_asked_for_is_found_out() {
    let id = CursorId([7; 16]);
    let mut client = Client::default();
    assert_eq!(client.received(&Frame::Done { cursor: id, batches: 0 }), Err(ScanError::UnknownCursor(id)));
    let opened = Frame::Opened { request: RequestId(9), cursor: id };
    assert_eq!(client.received(&opened), Err(ScanError::Unexpected));

    let (request, _) = client.init("", "");
    client.received(&Frame::Opened { request, cursor: id }).unwrap();
    let batch = |number| Frame::Batch { cursor: id, number };
    assert_eq!(client.received(&batch(0)), Err(ScanError::Credits(id)));
    client.iterate(id, 2).unwrap();
    assert_eq!(client.received(&batch(1)), Err(ScanError::Credits(id)));
    client.received(&batch(0)).unwrap();
    assert_eq!(client.credits(id), 1);
    assert_eq!(client.received(&Frame::Done { cursor: id, batches: 2 }), Err(ScanError::Unexpected));
    client.received(&Frame::Done { cursor: id, batches: 1 }).unwrap();
    assert_eq!(client.received(&batch(1)), Err(ScanError::Unexpected));
    assert_eq!(client.received(&Frame::Finalized { cursor: id }), Err(ScanError::Unexpected));
}

#[test]
fn a_cursor_expires_only_while_it_waits_for_its_client() {
    let idle = Duration::from_secs(10);
    let mut server = Server::new(ServerLimits { idle, ..ServerLimits::default() });
    let id = CursorId([1; 16]);
    let init = Frame::Init { request: RequestId(1), dataset: String::new(), sql: String::new() };
    server.received(init, START).unwrap();
    server.opened(RequestId(1), id, START).unwrap();
    let iterate = Frame::Iterate { cursor: id, credits: 1 };
    assert_eq!(server.received(iterate.clone(), START), Ok(Action::Resume(id)));
    // The query is slow: that is not the client's fault.
    assert!(server.expired(idle * 5).is_empty());
    assert!(server.batch(id, idle * 5).is_some());
    assert!(server.batch(id, idle * 5).is_none());
    // Nor that its client takes long to read a batch which it takes all the time.
    server.sent(id, idle * 7);
    assert!(server.expired(idle * 8 - Duration::from_secs(1)).is_empty());
    let expired = server.expired(idle * 8);
    assert!(matches!(
        &expired[..],
        [(_, Frame::Failed { failure: Failure { code: Code::Expired, .. }, .. })]
    ));
    assert!(server.expired(idle * 9).is_empty());
    assert_eq!(server.received(iterate, idle * 9), Ok(Action::None));
    let finalized = server.received(Frame::Finalize { cursor: id }, idle * 9);
    assert_eq!(finalized, Ok(Action::Close(id, Frame::Finalized { cursor: id })));
    assert_eq!(server.received(Frame::Cancel { cursor: id }, idle * 9), Err(ScanError::UnknownCursor(id)));
}

#[test]
fn a_cursor_is_written_as_a_uuid() {
    let id = CursorId(std::array::from_fn(|i| i as u8));
    assert_eq!(id.to_string(), "00010203-0405-0607-0809-0a0b0c0d0e0f");
}

#[test]
fn only_who_has_asked_for_loans_gets_them() {
    let (mut client, mut server) = (Client::default(), Server::new(ServerLimits::default()));
    let (request, init) = client.init("", "select 1");
    server.received(init, START).unwrap();
    let id = CursorId([7; 16]);
    client.received(&server.opened(request, id, START).unwrap()).unwrap();
    server.received(client.iterate(id, 3).unwrap(), START).unwrap();
    let lent = |number| Frame::Lent { cursor: id, number, bytes: 64, handle: [1; 32] };
    assert!(!server.lends());
    assert_eq!(client.received(&lent(0)), Err(ScanError::Unexpected));
    assert_eq!(server.received(client.accept_loans(), START), Ok(Action::None));
    assert!(server.lends());
    // They count as batches.
    client.received(&lent(0)).unwrap();
    assert_eq!(client.received(&lent(0)), Err(ScanError::Credits(id)));
    client.received(&lent(1)).unwrap();
    client.received(&Frame::Batch { cursor: id, number: 2 }).unwrap();
    assert_eq!(client.received(&lent(3)), Err(ScanError::Credits(id)));
}
