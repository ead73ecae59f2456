//! One process of a program of the differential test: see `thallus_tests::differential`.

use std::path::Path;

use rustix::stdio::stdin;
use thallus_tests::differential;

fn main() {
    let folder = std::env::args_os().nth(1).expect("usage: endpoint FOLDER");
    differential::serve(stdin(), Path::new(&folder));
}
