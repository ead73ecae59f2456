//! Both programs with the library: the same results, over shared memory. Wants THALLUS_LIBRARY, the path of
//! libthallus_shim.so.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::fs;

use support::{Outcome, Server, TRANSPORTS, dataset, server_program, statistics};

#[test]
fn results_travel_over_shared_memory() {
    let library = std::env::var("THALLUS_LIBRARY").expect("THALLUS_LIBRARY: the path of libthallus_shim.so");
    let folder = dataset();
    let stats = |name: &str| {
        let path = folder.path().join(name);
        fs::create_dir(&path).unwrap();
        path
    };
    let plain = Server::start(&folder, &[]);
    for transport in TRANSPORTS {
        // Often: over ipc the client says nothing after its request, so that it is a later one's answer that leaves TCP.
        let options = [
            "--sql",
            "FROM numbers WHERE i % 3 = 0",
            "--transport",
            transport,
            "--summary",
            "--checksum",
            "--repeat",
            "6",
        ];
        let expected = plain.run(&options).summary();
        let (of_server, of_client) =
            (stats(&format!("server-{transport}")), stats(&format!("client-{transport}")));
        let mut command = server_program();
        command.arg("--dataset").arg(folder.path().join("data"));
        let server = Server::spawn(command.env("LD_PRELOAD", &library).env("THALLUS_STATS", &of_server));
        let mut command = server.client(&options);
        let got = Outcome::of(command.env("LD_PRELOAD", &library).env("THALLUS_STATS", &of_client)).summary();
        assert_eq!(got["checksum"], expected["checksum"]);
        assert_eq!(got["rows"], 1_000_000);
        server.logged(&["gone; 0 queries are running"]);
        server.stop();

        let (server, client) = (statistics(&of_server), statistics(&of_client));
        for end in [&server, &client] {
            assert_eq!(end["upgraded"]["shm"], 1, "{end}");
        }
        // The first calls are made before the upgrade; all else passes through the ring.
        let bytes = got["bytes"].as_u64().unwrap();
        let ring = client["ring_bytes_received"].as_u64().unwrap();
        assert!(ring > bytes / 2, "{ring} of {bytes} bytes: {client}");
    }
}
