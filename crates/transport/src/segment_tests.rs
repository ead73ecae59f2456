use super::*;

const NONCE: Nonce = *b"0123456789abcdef";

#[test]
fn bytes_cross_between_two_mappings() {
    let (server, fd) = Segment::create(NONCE).unwrap();
    let client = Segment::accept(&fd, NONCE).unwrap();
    // SAFETY: the source is a live array.
    let pushed = unsafe { server.outlet().push(b"hello".as_ptr(), 5) }.unwrap();
    assert_eq!(pushed.bytes, 5);
    let mut seen = [0; 8];
    // SAFETY: the target is a live array.
    let popped = unsafe { client.inlet().ring().pop(seen.as_mut_ptr(), 8) }.unwrap();
    assert_eq!((&seen[..popped.bytes], popped.emptied), (&b"hello"[..], true));
}

#[test]
fn ends_with_one_processor_for_both_know_it() {
    let allowed = rustix::thread::sched_getaffinity(None).unwrap();
    let first = (0..CpuSet::MAX_CPU).find(|at| allowed.is_set(*at)).unwrap();
    let mut one = CpuSet::new();
    one.set(first);

    let (before, fd) = Segment::create(NONCE).unwrap();
    rustix::thread::sched_setaffinity(None, &one).unwrap();
    let client = Segment::accept(&fd, NONCE).unwrap();
    assert_eq!([before.shares_processor(), client.shares_processor()], [allowed.count() == 1; 2]);

    let (server, fd) = Segment::create(NONCE).unwrap();
    assert!(!server.shares_processor());
    let client = Segment::accept(&fd, NONCE).unwrap();
    assert!(server.shares_processor() && client.shares_processor());
}

#[test]
fn the_server_sees_when_the_client_is_ready() {
    let (server, fd) = Segment::create(NONCE).unwrap();
    let client = Segment::accept(&fd, NONCE).unwrap();
    assert!(!server.is_ready());
    assert!(client.set_ready());
    assert!(server.is_ready());
    assert!(!server.refuse());
}

#[test]
fn only_who_has_a_segment_alone_owes_a_greeting() {
    let (server, fd) = Segment::create(NONCE).unwrap();
    let client = Segment::accept(&fd, NONCE).unwrap();
    client.set_greeting(Greeting::OwesHello);
    assert_eq!((server.greeting(), client.greeting()), (Greeting::Done, Greeting::Done));
    let alone = Segment::create_alone(Role::Client, Greeting::OwesHello).unwrap();
    assert_eq!(alone.greeting(), Greeting::OwesHello);
}

#[test]
fn a_queue_pair_of_another_process_is_out_of_reach() {
    let alone = Segment::create_alone(Role::Server, Greeting::AwaitsHello).unwrap();
    assert!(!alone.is_out_of_reach() && alone.ends_in_memory().is_none());
    // As that one does.
    assert!(alone.set_ready());
    assert!(alone.is_out_of_reach() && alone.ends_in_memory().is_none());
    alone.take_down();
    assert!(!alone.is_out_of_reach());
    let (server, fd) = Segment::create(NONCE).unwrap();
    let client = Segment::accept(&fd, NONCE).unwrap();
    assert!(client.set_ready());
    assert!(!client.is_out_of_reach() && !server.is_out_of_reach() && server.ends_in_memory().is_some());
}

#[test]
fn threads_find_the_same_area_at_once() {
    let (server, fd) = Segment::create(NONCE).unwrap();
    let client = Segment::accept(&fd, NONCE).unwrap();
    assert!(client.set_ready());
    let find = || -> Vec<_> { (0..5000).map(|_| Arc::as_ptr(&server.area().unwrap()).addr()).collect() };
    let found = std::thread::scope(|scope| {
        [(); 4].map(|()| scope.spawn(find)).map(|thread| thread.join().unwrap()).concat()
    });
    assert!(found.iter().all(|&area| area == found[0]));
}

#[test]
fn what_is_lent_outlives_a_return_to_tcp() {
    let (server, fd) = Segment::create(NONCE).unwrap();
    let client = Segment::accept(&fd, NONCE).unwrap();
    assert!(client.set_ready());
    let memory = server.area().unwrap().allocate(1).unwrap();
    let handle = memory.lend(0, 1).unwrap();
    client.take_down();
    assert_eq!(client.area().unwrap().borrow(handle).unwrap().bytes(), 1);
    assert_eq!(server.area().unwrap().usage().1, 0);
}

/// What smaps (proc_pid_smaps(5)) says of the mapping at `address`.
fn flags_of(address: NonNull<u8>) -> String {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut inside = false;
    for line in maps.lines() {
        let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
        let ends = range.map(|(start, end)| [start, end].map(|end| usize::from_str_radix(end, 16)));
        if let Some([Ok(start), Ok(end)]) = ends {
            inside = (start..end).contains(&address.addr().get());
        } else if inside && line.starts_with("VmFlags:") {
            return line.to_owned();
        }
    }
    panic!("{address:?} is not mapped");
}

#[test]
fn core_dumps_leave_segments_and_areas_out() {
    let (server, fd) = Segment::create(NONCE).unwrap();
    let client = Segment::accept(&fd, NONCE).unwrap();
    assert!(client.set_ready());
    let memory = client.area().unwrap().allocate(1).unwrap();
    for address in [server.base, client.base, memory.address()] {
        let flags = flags_of(address);
        assert!(flags.split(' ').any(|flag| flag == "dd"), "{flags}");
    }
}

#[test]
fn a_segment_that_the_server_withdrew_is_not_used() {
    let (server, fd) = Segment::create(NONCE).unwrap();
    assert!(server.refuse());
    assert!(!Segment::accept(&fd, NONCE).unwrap().set_ready());
    assert!(!server.is_ready());
}

#[test]
fn a_segment_of_another_nonce_or_shape_is_refused() {
    let (_server, fd) = Segment::create(NONCE).unwrap();
    assert!(matches!(Segment::accept(&fd, [0; 16]), Err(OfferError::Header)));

    let short = memfd_create("short", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&short, 4096).unwrap();
    fcntl_add_seals(&short, SealFlags::SHRINK).unwrap();
    assert!(matches!(Segment::accept(&short, NONCE), Err(OfferError::Shape)));

    let unsealed = memfd_create("unsealed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&unsealed, SEGMENT_BYTES as u64).unwrap();
    assert!(matches!(Segment::accept(&unsealed, NONCE), Err(OfferError::Shape)));
}
