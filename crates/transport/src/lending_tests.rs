use std::os::fd::OwnedFd;

use rustix::mm::{MprotectFlags, mprotect};

use super::*;
use crate::segment::Segment;

/// Both ends of a segment, in one process.
fn ends() -> (Arc<Area>, Arc<Area>) {
    let (server, client, _) = ends_and_file();
    (server, client)
}

/// The same, and the file behind them.
fn ends_and_file() -> (Arc<Area>, Arc<Area>, OwnedFd) {
    let nonce = *b"0123456789abcdef";
    let (server, fd) = Segment::create(nonce).unwrap();
    let client = Segment::accept(&fd, nonce).unwrap();
    assert_eq!(server.area().unwrap_err(), Errno::OPNOTSUPP, "the client is not there yet");
    assert!(client.set_ready());
    // The segments go, the areas stay.
    (server.area().unwrap(), client.area().unwrap(), fd)
}

/// Bytes of memory behind the file.
fn resident(file: &OwnedFd) -> u64 {
    rustix::fs::fstat(file).unwrap().st_blocks.cast_unsigned() * 512
}

fn fill(memory: &Memory, byte: u8) {
    // SAFETY: nobody else uses the memory.
    unsafe { memory.address().write_bytes(byte, memory.bytes()) };
}

fn bytes(loan: &Loan) -> &[u8] {
    // SAFETY: the test's other end leaves it alone.
    unsafe { std::slice::from_raw_parts(loan.address().as_ptr(), loan.bytes()) }
}

#[test]
fn what_is_lent_is_read_in_place() {
    let (server, client) = ends();
    for (owner, peer) in [(&server, &client), (&client, &server)] {
        let memory = owner.allocate(100_000).unwrap();
        fill(&memory, 7);
        let handle = memory.lend(1000, 99_000).unwrap();
        let loan = peer.borrow(Handle::of_bytes(&handle.to_bytes()).unwrap()).unwrap();
        assert_eq!(bytes(&loan), [7; 99_000]);
        fill(&memory, 8);
        assert_eq!(bytes(&loan), [8; 99_000]);
    }
}

#[test]
fn memory_is_used_again_once_it_is_back() {
    let (server, client) = ends();
    let memory = server.allocate(50_000).unwrap();
    let first = memory.address();
    let handles = [memory.lend(0, 1).unwrap(), memory.lend(0, 50_000).unwrap()];
    drop(memory);
    let other = server.allocate(50_000).unwrap();
    assert_ne!(other.address(), first);
    let loans = handles.map(|handle| client.borrow(handle).unwrap());
    drop(loans);
    assert_eq!(server.allocate(49_000).unwrap().address(), first);
}

#[test]
fn a_smaller_allocation_leaves_a_place_as_large_as_it_was() {
    let (server, _client) = ends();
    let [large, small] = [6 << 20, 4 << 20];
    let first = server.allocate(large).unwrap().address();
    for bytes in [small, large, small, large] {
        assert_eq!(server.allocate(bytes).unwrap().address(), first);
        assert_eq!(server.usage(), (0, large as u64));
    }
}

#[test]
fn a_loan_is_taken_once() {
    let (server, client) = ends();
    let memory = server.allocate(10).unwrap();
    let handle = memory.lend(0, 10).unwrap();
    let loan = client.borrow(handle).unwrap();
    assert_eq!(client.borrow(handle).unwrap_err(), Errno::INVAL);
    assert_eq!(memory.loans(), 1);
    drop(loan);
    assert_eq!(memory.loans(), 0);
    assert_eq!(client.borrow(handle).unwrap_err(), Errno::INVAL);
    // The place in the table is used again, by another number.
    let next = memory.lend(0, 10).unwrap();
    assert_eq!(next.loan, handle.loan);
    assert_eq!(client.borrow(handle).unwrap_err(), Errno::INVAL);
    assert_eq!(client.borrow(next).unwrap().bytes(), 10);
}

#[test]
fn a_copy_stops_where_either_ends() {
    let (server, client) = ends();
    let memory = server.allocate(10).unwrap();
    fill(&memory, 5);
    for room in [4, 10, 16] {
        let mut parts = [[0_u8; 8]; 2];
        let list = parts
            .each_mut()
            .map(|part| libc::iovec { iov_base: part.as_mut_ptr().cast(), iov_len: room / 2 });
        let loan = client.borrow(memory.lend(0, 10).unwrap()).unwrap();
        assert_eq!(loan.copy_to(&mut Buffers::new(&list).unwrap()), room.min(10));
        let copied = parts.concat().into_iter().filter(|&byte| byte == 5).count();
        assert_eq!(copied, room.min(10));
    }
}

#[test]
fn the_limit_holds_and_memory_goes_back() {
    let (server, client) = ends();
    let limit = settings().lend_bytes as usize;
    let large = server.allocate(limit).unwrap();
    assert_eq!(server.allocate(1).unwrap_err(), Errno::NOBUFS);
    let loan = client.borrow(large.lend(0, limit).unwrap()).unwrap();
    drop(large);
    assert_eq!(server.usage(), (limit as u64, 0));
    drop(loan);
    assert_eq!(server.usage(), (0, 0), "more than is kept");
    assert_eq!(server.allocate(limit + 1).unwrap_err(), Errno::NOBUFS);
    assert_eq!(server.allocate(0).unwrap_err(), Errno::INVAL);
    drop(server.allocate(100_000).unwrap());
    let (used, spare) = server.usage();
    assert!(used == 0 && spare >= 100_000);
    server.trim();
    assert_eq!(server.usage(), (0, 0));
    drop(server.allocate(100_000).unwrap());
    // What is kept makes room for what is needed.
    server.allocate(limit).unwrap();
}

#[test]
fn loans_run_out() {
    let (server, client) = ends();
    let memory = server.allocate(1).unwrap();
    let handles: Vec<_> = (0..LOANS).map(|_| memory.lend(0, 1).unwrap()).collect();
    assert_eq!(memory.lend(0, 1).unwrap_err(), Errno::NOBUFS);
    drop(client.borrow(handles[LOANS / 2]).unwrap());
    memory.lend(0, 1).unwrap();
    assert_eq!(memory.lend(0, 1).unwrap_err(), Errno::NOBUFS);
}

#[test]
fn a_second_process_of_an_end_can_borrow_but_not_allocate() {
    let nonce = *b"0123456789abcdef";
    let (server, fd) = Segment::create(nonce).unwrap();
    let clients = [0, 1].map(|_| Segment::accept(&fd, nonce).unwrap());
    assert!(clients[0].set_ready() && clients[1].set_ready());
    let [first, second] = clients.map(|client| client.area().unwrap());
    let _memory = first.allocate(1).unwrap();
    assert_eq!(second.allocate(1).unwrap_err(), Errno::BUSY);
    let memory = server.area().unwrap().allocate(1).unwrap();
    drop(second.borrow(memory.lend(0, 1).unwrap()).unwrap());
    assert_eq!(memory.loans(), 0);
}

#[test]
fn handles_that_lie_are_refused() {
    let (server, client) = ends();
    let memory = server.allocate(10).unwrap();
    let good = memory.lend(0, 10).unwrap();
    let area = AREA_BYTES as u64;
    for bad in [
        Handle { offset: area, ..good },
        Handle { offset: u64::MAX, ..good },
        Handle { bytes: u64::MAX, ..good },
        Handle { offset: area - 9, ..good },
        Handle { loan: LOANS as u32, ..good },
        Handle { loan: u32::MAX, ..good },
    ] {
        assert_eq!(Handle::of_bytes(&bad.to_bytes()).unwrap_err(), Errno::INVAL, "{bad:?}");
    }
    let mut padded = good.to_bytes();
    padded[31] = 1;
    assert_eq!(Handle::of_bytes(&padded).unwrap_err(), Errno::INVAL);
    for (unknown, why) in
        [(Handle { loan: 5, ..good }, "never lent"), (Handle { number: 0, ..good }, "an old number")]
    {
        assert_eq!(client.borrow(unknown).unwrap_err(), Errno::INVAL, "{why}");
    }
    assert_eq!(memory.lend(0, 11).unwrap_err(), Errno::INVAL);
    assert_eq!(memory.lend(usize::MAX, 2).unwrap_err(), Errno::INVAL);
    assert_eq!(client.borrow(good).unwrap().bytes(), 10);
}

#[test]
fn memory_goes_back_to_the_system() {
    let (server, client, file) = ends_and_file();
    let before = resident(&file);
    let memory = server.allocate(64 << 20).unwrap();
    assert_eq!(resident(&file), before + (64 << 20), "what is lent");
    let loan = client.borrow(memory.lend(0, 64 << 20).unwrap()).unwrap();
    drop(memory);
    assert_eq!(server.usage(), (64 << 20, 0));
    drop(loan);
    assert_eq!(server.usage(), (0, 0), "more than is kept");
    assert_eq!(resident(&file), before);
    drop(server.allocate(1 << 20).unwrap());
    assert_eq!(server.usage(), (0, 1 << 20));
    server.trim();
    assert_eq!((server.usage(), resident(&file)), ((0, 0), before));
}

#[test]
fn what_the_peer_keeps_keeps_nothing_else() {
    let (server, client, file) = ends_and_file();
    let small = server.allocate(1).unwrap();
    let loan = client.borrow(small.lend(0, 1).unwrap()).unwrap();
    let lent = resident(&file);
    drop(server.allocate(64 << 20).unwrap());
    assert_eq!((server.usage(), resident(&file)), ((PAGE, 64 << 20), lent + (64 << 20)));
    drop((small, server));
    assert_eq!(resident(&file), lent);
    assert_eq!(loan.bytes(), 1);
}

#[test]
fn nothing_is_kept_for_a_connection_that_is_closed() {
    let (server, client, file) = ends_and_file();
    let small = server.allocate(1).unwrap();
    let _loan = client.borrow(small.lend(0, 1).unwrap()).unwrap();
    let lent = resident(&file);
    let large = server.allocate(3 << 20).unwrap();
    drop(server.allocate(1 << 20).unwrap());
    server.close();
    assert_eq!((server.usage(), resident(&file)), ((PAGE + (3 << 20), 0), lent + (3 << 20)));
    drop(large);
    assert_eq!((server.usage(), resident(&file)), ((PAGE, 0), lent));
}

#[test]
fn who_closes_does_not_wait() {
    let (server, _client, file) = ends_and_file();
    let memory = server.allocate(1 << 20).unwrap();
    let pool = server.pool();
    server.close();
    drop(pool);
    let taken = resident(&file);
    drop(memory);
    assert_eq!((server.usage(), resident(&file)), ((0, 0), taken - (1 << 20)));
}

#[test]
fn an_allocation_that_fails_midway_leaves_nothing() {
    let (server, _client, file) = ends_and_file();
    let before = resident(&file);
    let hole = server.at(server.ours(), 1 << 20).as_ptr().cast();
    // SAFETY: of our own mapping, which nobody uses.
    unsafe { mprotect(hole, PAGE as usize, MprotectFlags::READ) }.unwrap();
    server.allocate(2 << 20).unwrap_err();
    assert_eq!((server.usage(), resident(&file)), ((0, 0), before));
    // SAFETY: as above.
    unsafe { mprotect(hole, PAGE as usize, MprotectFlags::READ | MprotectFlags::WRITE) }.unwrap();
    fill(&server.allocate(2 << 20).unwrap(), 1);
}

#[test]
fn spares_make_way_for_what_fits_nowhere_between_them() {
    let (server, _client) = ends();
    let mut pool = server.pool();
    pool.spares.extend((0..8).map(|index| (index * (128 << 20), PAGE)));
    assert_eq!(server.find_room(&mut pool, 200 << 20, AREA_BYTES as u64), Ok(0));
    assert_eq!(pool.spare(), 0);
}

#[test]
fn what_can_not_be_had_costs_no_spares() {
    let (server, _client) = ends();
    let limit = settings().lend_bytes as usize;
    let _memory = server.allocate(1).unwrap();
    drop(server.allocate(50_000).unwrap());
    let usage = server.usage();
    assert!(usage.1 >= 50_000);
    assert_eq!(server.allocate(limit).unwrap_err(), Errno::NOBUFS);
    assert_eq!(server.usage(), usage);
}

#[test]
fn a_handle_means_nothing_on_another_connection() {
    let [(first, _), (second, client)] = [ends(), ends()];
    let memories = [&first, &second].map(|owner| owner.allocate(10).unwrap());
    let [foreign, good] = memories.each_ref().map(|memory| memory.lend(0, 10).unwrap());
    assert_eq!(client.borrow(foreign).unwrap_err(), Errno::INVAL);
    assert_eq!(client.borrow(good).unwrap().bytes(), 10);
}

/// Numbers without a pattern, the same each time (Marsaglia, "Xorshift RNGs", 2003).
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// Two live allocations never share a byte, whatever the borrower does.
#[test]
fn threads_allocate_lend_and_give_back_at_once() {
    const THREADS: u64 = 4;
    const ROUNDS: usize = 1500;
    let (server, client, file) = ends_and_file();
    let before = resident(&file);
    std::thread::scope(|scope| {
        for thread in 1..=THREADS {
            let (server, client) = (&server, &client);
            scope.spawn(move || {
                let mut dice = Dice(thread);
                let mut loans = Vec::new();
                for _ in 0..ROUNDS {
                    let memory = server.allocate(1 + dice.below(60_000) as usize).unwrap();
                    let sign = dice.below(256) as u8;
                    fill(&memory, sign);
                    for _ in 0..dice.below(3) {
                        let loan = client.borrow(memory.lend(0, memory.bytes()).unwrap()).unwrap();
                        loans.push((loan, sign));
                    }
                    while loans.len() > 20 {
                        let (loan, sign) = loans.swap_remove(dice.below(loans.len() as u64) as usize);
                        assert!(bytes(&loan).iter().all(|&byte| byte == sign));
                    }
                }
                for (loan, sign) in loans {
                    assert!(bytes(&loan).iter().all(|&byte| byte == sign));
                }
            });
        }
    });
    let (used, spare) = server.usage();
    assert!(used == 0 && spare <= SPARE, "{used} {spare}");
    assert_eq!(resident(&file), before + spare, "what is kept");
}

/// A peer that writes to the tables costs its owner loans, but never confuses the books.
#[test]
fn a_table_that_lies_confuses_nobody() {
    let (server, client) = ends();
    let mut dice = Dice(7);
    let mut live: Vec<Memory> = Vec::new();
    let mut loans = Vec::new();
    for _ in 0..3000 {
        let table = server.table(dice.below(2) as usize);
        if dice.below(50) == 0 {
            table.owner.store([0, server.token, dice.0][dice.below(3) as usize], Ordering::Relaxed);
        }
        let last = server.pool().last_number;
        let number = last.wrapping_sub(dice.below(20) as u32).wrapping_add(dice.below(3) as u32);
        let lie = [word(number, dice.below(4)), dice.0, 0][dice.below(3) as usize];
        table.loans[dice.below(40) as usize].store(lie, Ordering::Relaxed);
        if let Ok(memory) = server.allocate(1 + dice.below(20_000) as usize) {
            fill(&memory, 1);
            if let Ok(handle) = memory.lend(0, memory.bytes()) {
                loans.extend(client.borrow(handle));
            }
            live.push(memory);
        }
        while live.len() > 30 {
            live.swap_remove(dice.below(30) as usize);
        }
        if dice.below(3) == 0 {
            loans.clear();
        }
        let mut places: Vec<_> = live.iter().map(|memory| (memory.offset, memory.bytes as u64)).collect();
        places.sort_unstable();
        assert!(places.is_sorted_by(|a, b| a.0 + a.1 <= b.0));
        let pool = server.pool();
        let all = pool.taken.iter().map(|(&offset, taken)| (offset, taken.length));
        let mut all: Vec<_> =
            all.chain(pool.spares.iter().map(|(&offset, &spare)| (offset, spare))).collect();
        all.sort_unstable();
        assert!(all.is_sorted_by(|a, b| a.0 + a.1 <= b.0));
        let mut out: Vec<_> = pool.taken.values().flat_map(|taken| &taken.loans).map(|loan| loan.0).collect();
        out.extend(&pool.free_loans);
        out.sort_unstable();
        assert!(out.is_sorted_by(|a, b| a < b), "a place in the table is used once");
    }
}
