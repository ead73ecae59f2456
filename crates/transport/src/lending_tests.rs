use super::*;
use crate::segment::Segment;

/// Both ends of a segment, in one process.
fn ends() -> (Arc<Area>, Arc<Area>) {
    let nonce = *b"0123456789abcdef";
    let (server, fd) = Segment::create(nonce).unwrap();
    let client = Segment::accept(&fd, nonce).unwrap();
    assert_eq!(server.area().unwrap_err(), Errno::OPNOTSUPP, "the client is not there yet");
    assert!(client.set_ready());
    // The segments go, the areas stay.
    (server.area().unwrap(), client.area().unwrap())
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
