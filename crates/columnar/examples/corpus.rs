//! Writes streams of random schemas into a folder, for the fuzzer to begin with: `corpus FOLDER`.

#[path = "../tests/arrays/mod.rs"]
#[allow(clippy::unwrap_used, reason = "arrays are made as the tests make them")]
mod arrays;

use std::error::Error;
use std::path::PathBuf;

use arrays::{Random, Shape, any_batch, any_schema};
use thallus_columnar::{EncodeOptions, Encoder};

fn main() -> Result<(), Box<dyn Error>> {
    let folder = PathBuf::from(std::env::args_os().nth(1).ok_or("which folder?")?);
    std::fs::create_dir_all(&folder)?;
    for seed in 0..200 {
        let mut random = Random(seed);
        let columns = 1 + random.below(3);
        let schema = any_schema(&mut random, columns, 2);
        let mut encoder =
            Encoder::new(&schema, EncodeOptions { dictionary_deltas: true, ..EncodeOptions::default() })?;
        let mut stream = Vec::new();
        encoder.schema().write_to(&mut stream)?;
        for _ in 0..2 {
            let rows = random.below(12);
            let batch = any_batch(&mut random, &schema, rows, Shape { sliced: true, tame: false });
            for message in encoder.batch(&batch)? {
                message.write_to(&mut stream)?;
            }
        }
        encoder.end().write_to(&mut stream)?;
        std::fs::write(folder.join(format!("{seed}.arrows")), stream)?;
    }
    Ok(())
}
