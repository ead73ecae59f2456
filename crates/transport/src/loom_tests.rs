//! Models of the ring and of the waiting protocol: loom runs each under every interleaving, and every value that a
//! relaxed load may see, up to a bound of preemptions.
//!
//! What runs is the code itself: [`crate::control`], [`crate::ring`], [`crate::waiting`] and [`crate::verbs::scan`]. Only the kernel is
//! modelled ([`Pipe`], one direction of the TCP connection), and the system calls on it.

mod fabric;
mod models;
mod scan;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use loom::sync::{Condvar, Mutex, MutexGuard};
use rustix::io::Errno;

use crate::control::{Control, Wakes, end};
use crate::ring::{Consumer, Known, Memory, Producer, class_offset, has_room};
use crate::waiting::{self, Side};

/// What a bell looks like among the application's bytes.
const BELL: u8 = u8::MAX;

/// Bytes that a receiver has room for.
const ROOM: usize = 2;

/// Runs `model` under all interleavings with up to `preemptions` switches at places where a thread could go on.
fn explore(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(preemptions);
    builder.max_branches = 10_000;
    builder.check(model);
}

/// One direction of the TCP connection: bytes of the application, then bells.
#[derive(Debug)]
struct Pipe {
    state: Mutex<Unread>,
    arrival: Condvar,
}

#[derive(Debug, Default)]
struct Unread {
    text: VecDeque<u8>,
    bells: u64,
    /// The sender has shut down.
    ended: bool,
    /// How often something has arrived.
    arrivals: u64,
    /// What has been rung beside TCP, and nobody has heard yet: as if the receiver's ear were part of the pipe.
    chimes: u64,
}

impl Pipe {
    fn new() -> Self {
        Self { state: Mutex::new(Unread::default()), arrival: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Unread> {
        self.state.lock().unwrap()
    }

    fn put(&self, change: impl FnOnce(&mut Unread)) {
        let mut state = self.state.lock().unwrap();
        change(&mut state);
        state.arrivals += 1;
        self.arrival.notify_all();
    }

    /// A blocking `recv(MSG_PEEK)`, or a level-triggered wait.
    fn sleep_until_readable(&self) {
        self.sleep_until_readable_or(false);
    }

    /// As [`Self::sleep_until_readable`]. If the sleeper `listens`, a chime ends it, too, and is heard.
    fn sleep_until_readable_or(&self, listens: bool) {
        let mut state = self.lock();
        while !state.is_readable() && !(listens && state.chimes > 0) {
            state = self.arrival.wait(state).unwrap();
        }
        if listens {
            state.chimes = 0;
        }
    }

    /// An edge-triggered wait: until something arrives that was not there when the wait began, unless `done`. A chime ends it, and is
    /// heard, if the sleeper `listens`.
    fn sleep_until_arrival(&self, listens: bool, done: impl FnOnce() -> bool) {
        let mut seen = self.lock().arrivals;
        if done() {
            return;
        }
        let mut state = self.lock();
        loop {
            while state.arrivals == seen {
                state = self.arrival.wait(state).unwrap();
            }
            // What somebody else has taken meanwhile, epoll(7) does not report.
            if state.is_readable() || listens && std::mem::take(&mut state.chimes) > 0 {
                return;
            }
            seen = state.arrivals;
        }
    }

    /// recv(2), without waiting, of up to `most` bytes.
    fn recv(&self, most: usize, peek: bool) -> Result<Vec<u8>, Errno> {
        let mut state = self.lock();
        if most == 0 || !state.is_readable() {
            return Err(Errno::AGAIN);
        }
        let mut bytes: Vec<u8> = state.text.iter().copied().take(most).collect();
        let text = bytes.len();
        let bells = state.bells.min((most - text) as u64);
        bytes.resize(text + bells as usize, BELL);
        if !peek {
            state.text.drain(..text);
            state.bells -= bells;
        }
        Ok(bytes)
    }
}

impl Unread {
    fn is_readable(&self) -> bool {
        !self.text.is_empty() || self.bells > 0 || self.ended
    }
}

/// The memory of one direction: the windows of the two smallest classes.
#[derive(Debug)]
struct Cells(Vec<UnsafeCell<u8>>);

impl Cells {
    fn new() -> Self {
        Self((0..class_offset(2)).map(|_| UnsafeCell::new(0)).collect())
    }
}

// SAFETY: an access out of bounds panics; loom fails where two accesses of a byte are not ordered.
unsafe impl Memory for Cells {
    unsafe fn put(&self, offset: u64, source: *const u8, length: usize) {
        for index in 0..length {
            // SAFETY: index < length.
            let from = unsafe { source.add(index) };
            // SAFETY: readable, and the cell is written while loom watches.
            self.0[offset as usize + index].with_mut(|cell| unsafe { cell.copy_from(from, 1) });
        }
    }
    unsafe fn take(&self, offset: u64, target: *mut u8, length: usize) {
        for index in 0..length {
            // SAFETY: index < length.
            let to = unsafe { target.add(index) };
            // SAFETY: writable, and the cell is read while loom watches.
            self.0[offset as usize + index].with(|cell| unsafe { cell.copy_to(to, 1) });
        }
    }
    fn populate(&self, _: u64, _: u64) -> bool {
        true
    }
    fn discard(&self, _: u32) {}
}

/// What carries one direction.
#[derive(Debug)]
struct Lane {
    control: Control,
    memory: Cells,
    pipe: Pipe,
}

impl Lane {
    fn new() -> Self {
        Self { control: Control::new(), memory: Cells::new(), pipe: Pipe::new() }
    }
}

/// One side of the connection, with the words that its forks share.
#[derive(Debug)]
struct End {
    from: Arc<Lane>,
    to: Arc<Lane>,
    recv_lock: Mutex<()>,
    drained: AtomicU64,
    tcp_received: AtomicU64,
    recv_switched: AtomicU32,
    /// No atomic of loom's: it is changed together with `recv_switched`, at whose accesses threads are switched.
    is_back: AtomicBool,
    side_buffer: Mutex<VecDeque<u8>>,
    known: Known,
}

/// An upgraded connection, of which neither direction has left TCP.
fn connection() -> (Arc<End>, Arc<End>) {
    let (there, back) = (Arc::new(Lane::new()), Arc::new(Lane::new()));
    (Arc::new(End::new(back.clone(), there.clone())), Arc::new(End::new(there, back)))
}

/// A connection both of whose directions have left TCP without a byte.
fn switched_connection() -> (Arc<End>, Arc<End>) {
    let (near, far) = connection();
    for end in [&near, &far] {
        end.leave_tcp(0);
        end.recv_switched.store(1, Ordering::Relaxed);
    }
    (near, far)
}

impl End {
    fn new(from: Arc<Lane>, to: Arc<Lane>) -> Self {
        Self {
            from,
            to,
            recv_lock: Mutex::new(()),
            drained: AtomicU64::new(0),
            tcp_received: AtomicU64::new(0),
            recv_switched: AtomicU32::new(0),
            is_back: AtomicBool::new(false),
            side_buffer: Mutex::new(VecDeque::new()),
            known: Known::new(),
        }
    }

    fn producer(&self) -> Producer<'_, Cells> {
        Producer::new(&self.to.control, &self.to.memory, &self.known)
    }

    fn consumer(&self) -> Consumer<'_, Cells> {
        Consumer::new(&self.from.control, &self.from.memory)
    }

    /// As `Connection::try_send`: returns how many bytes were taken.
    fn try_send(&self, bytes: &[u8]) -> usize {
        // SAFETY: a live slice.
        let pushed = unsafe { self.producer().push(bytes.as_ptr(), bytes.len()) }.unwrap();
        if pushed.ring {
            waiting::ring(self);
        }
        pushed.bytes
    }

    /// As a blocking send(2) of one byte.
    fn send(&self, byte: u8) {
        while self.try_send(&[byte]) == 0 {
            let done = || self.has_space();
            waiting::sleep_for_space(self, done, |clear| {
                if clear {
                    self.from.pipe.sleep_until_readable();
                } else {
                    self.from.pipe.sleep_until_arrival(false, || {
                        waiting::renew(self, false, true);
                        done()
                    });
                }
                Ok(())
            })
            .unwrap();
        }
    }

    /// As shutdown(2) of sending.
    fn shut_sending(&self) {
        if self.to.control.finish(end::FIN) {
            waiting::ring(self);
        }
    }

    /// Sends over TCP.
    fn send_text(&self, text: &[u8]) {
        self.to.pipe.put(|unread| unread.text.extend(text));
    }

    /// As `Connection::send_switched`, after `sent` bytes over TCP.
    fn leave_tcp(&self, sent: u64) {
        self.to.control.rare.0.switched_at.store(sent, Ordering::SeqCst);
    }

    /// As `Connection::try_recv`, with room for `most` bytes. Empty at the end of the stream.
    fn try_recv(&self, most: usize) -> Result<Vec<u8>, Errno> {
        let _guard = Side::lock(self)?;
        let mut aside = self.side_buffer.lock().unwrap();
        if !aside.is_empty() {
            let count = most.min(aside.len());
            return Ok(aside.drain(..count).collect());
        }
        drop(aside);
        if !waiting::is_settled(self)
            && let Some(result) = self.take_tcp(most)
        {
            return result;
        }
        let mut bytes = vec![0; most];
        // SAFETY: a live vector.
        let count = unsafe { self.consumer().peek(0, bytes.as_mut_ptr(), most) }.unwrap();
        bytes.truncate(count);
        if count == 0 {
            let ended = self.from.control.is_empty() && self.from.control.end() & end::FIN != 0;
            return if ended { Ok(bytes) } else { Err(Errno::AGAIN) };
        }
        let popped = self.consumer().consume(count).unwrap();
        if popped.ring {
            waiting::ring(self);
        }
        if popped.emptied {
            waiting::drain(self);
        }
        Ok(bytes)
    }

    fn take_tcp(&self, most: usize) -> Option<Result<Vec<u8>, Errno>> {
        let mut bytes = Vec::new();
        let taken = waiting::take_tcp(self, false, |limit, peek| {
            bytes = self.from.pipe.recv(most.min(usize::try_from(limit).unwrap_or(most)), peek)?;
            Ok(bytes.len())
        })?;
        Some(taken.map(|count| {
            bytes.truncate(count);
            bytes
        }))
    }

    /// As a blocking recv(2) into [`ROOM`] bytes. Empty at the end of the stream.
    fn recv(&self) -> Vec<u8> {
        loop {
            match self.try_recv(ROOM) {
                Err(Errno::AGAIN) => {}
                result => return result.unwrap(),
            }
            waiting::sleep_for_data(self, |clear| {
                if clear {
                    self.from.pipe.sleep_until_readable();
                } else {
                    self.from.pipe.sleep_until_arrival(false, || {
                        waiting::renew(self, true, false);
                        self.is_readable()
                    });
                }
                Ok(())
            })
            .unwrap();
        }
    }

    /// As [`Self::recv`] by way of poll(2), by the thread that has claimed the ear.
    fn recv_listening(&self) -> Vec<u8> {
        loop {
            match self.try_recv(ROOM) {
                Err(Errno::AGAIN) => {}
                result => return result.unwrap(),
            }
            waiting::arm(self, true, false, Wakes::ByChime);
            if !self.is_readable() {
                self.from.pipe.sleep_until_readable_or(true);
                self.interpret();
            }
            waiting::disarm(&self.from.control, &self.to.control, false, Wakes::ByChime);
        }
    }

    /// As [`Self::send`] by way of poll(2), by the thread that has claimed the ear.
    fn send_listening(&self, byte: u8) {
        while self.try_send(&[byte]) == 0 {
            self.poll_writable(Wakes::ByChime);
        }
    }

    /// As poll(2) for writing alone.
    fn poll_writable(&self, wakes: Wakes) {
        let listens = wakes == Wakes::ByChime;
        while !self.has_space() {
            let clear = waiting::arm(self, false, true, wakes);
            if !self.has_space() {
                if clear {
                    self.from.pipe.sleep_until_readable_or(listens);
                } else {
                    self.from.pipe.sleep_until_arrival(listens, || {
                        waiting::renew(self, true, true);
                        self.has_space()
                    });
                }
                self.interpret();
            }
            waiting::disarm(&self.from.control, &self.to.control, true, wakes);
        }
    }

    /// As poll(2) for nothing but the end of the stream, which leaves bytes where they are.
    fn poll_end(&self) {
        let ended = || self.from.control.end() & end::FIN != 0;
        while !ended() {
            let clear = waiting::arm(self, false, false, Wakes::ByTcp);
            if !ended() {
                if clear {
                    self.from.pipe.sleep_until_readable();
                } else {
                    self.from.pipe.sleep_until_arrival(false, || {
                        waiting::renew(self, true, false);
                        ended()
                    });
                }
                self.interpret();
            }
            self.from.control.data_armed.0.disarm(Wakes::ByTcp);
        }
    }

    /// As `Connection::interpret`, when the kernel has reported the socket as readable.
    fn interpret(&self) {
        let _guard = Side::lock(self).unwrap();
        waiting::drain(self);
    }

    /// As the way back to TCP of a side whose hooks go on to see each call: what is in the ring is moved to the side buffer, and the bells
    /// for it are taken. Not if somebody sleeps, if this side `looks` for that.
    fn move_aside(&self, looks: bool) {
        let _guard = Side::lock(self).unwrap();
        if looks && self.from.control.data_armed.0.has_sleepers() {
            return;
        }
        let mut bytes = vec![0; ROOM];
        // SAFETY: a live vector.
        let count = unsafe { self.consumer().peek(0, bytes.as_mut_ptr(), ROOM) }.unwrap();
        if count > 0 {
            self.side_buffer.lock().unwrap().extend(&bytes[..count]);
            self.consumer().consume(count).unwrap();
        }
        waiting::drain(self);
    }

    /// As the way back to TCP, where nothing is left of the ring: what comes from now on is the application's.
    fn go_back(&self) {
        let _guard = Side::lock(self).unwrap();
        self.is_back.store(true, Ordering::SeqCst);
        self.recv_switched.store(0, Ordering::SeqCst);
    }

    /// An event loop on a registration that is armed for good: recv(2) when the kernel reports it.
    fn recv_when_reported(&self) -> Vec<u8> {
        loop {
            self.from.pipe.sleep_until_readable();
            self.interpret();
            match self.try_recv(ROOM) {
                Err(Errno::AGAIN) => self.pause(),
                result => return result.unwrap(),
            }
        }
    }
}

impl Side for End {
    type Guard<'a> = MutexGuard<'a, ()>;

    fn incoming(&self) -> &Control {
        &self.from.control
    }

    fn outgoing(&self) -> &Control {
        &self.to.control
    }

    fn drained(&self) -> &AtomicU64 {
        &self.drained
    }

    fn recv_switched(&self) -> &AtomicU32 {
        &self.recv_switched
    }

    fn tcp_received(&self) -> &AtomicU64 {
        &self.tcp_received
    }

    fn is_back(&self) -> bool {
        self.is_back.load(Ordering::SeqCst)
    }

    fn lock(&self) -> Result<MutexGuard<'_, ()>, Errno> {
        Ok(self.recv_lock.lock().unwrap())
    }

    fn is_readable(&self) -> bool {
        (self.from.control.has_news() && waiting::looks_settled(self))
            || !self.side_buffer.lock().unwrap().is_empty()
    }

    fn has_space(&self) -> bool {
        has_room(&self.to.control)
    }

    fn absorb(&self, keep_one: bool) -> bool {
        while !waiting::is_settled(self) {
            let unread = self.from.pipe.lock().text.len();
            let most = if keep_one { unread.saturating_sub(1) } else { unread };
            let Some(Ok(bytes)) = self.take_tcp(most) else { return unread == 0 };
            self.side_buffer.lock().unwrap().extend(bytes);
        }
        true
    }

    fn take_bells(&self, most: u64) {
        let bells = self.from.pipe.recv(most as usize, false).unwrap_or_default();
        waiting::add(&self.drained, bells.len() as u64);
    }

    fn thin_out_bells(&self, most: u64) {
        let there = self.from.pipe.lock().bells;
        self.take_bells(most.min(there.saturating_sub(1)));
    }

    fn put_bell(&self) -> bool {
        self.to.pipe.put(|unread| unread.bells += 1);
        true
    }

    fn chime(&self) -> bool {
        self.to.pipe.put(|unread| unread.chimes += 1);
        true
    }

    fn pause(&self) {
        loom::thread::yield_now();
    }
}
