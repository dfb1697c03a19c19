//! What checksums cost: `cargo run --release -p basalt-state --example checksums -- [DIRECTORY [MIB]]` writes a file with so much content,
//! which is in the page cache then, reads it alone, reads and sums it, and prints processor time and wall time of each for 1 GiB; the
//! least of five times. Knows no snapshot.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::path::PathBuf;
use std::time::Instant;

use state::Scan;

const MIB: usize = 1 << 20;

fn main() -> io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let directory = arguments.next().map_or_else(std::env::temp_dir, PathBuf::from);
    let mib: u32 = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(1024);
    let path = directory.join(format!("basalt-checksums-{}", std::process::id()));
    let measured = measure(&path, mib);
    fs::remove_file(&path)?;
    measured
}

fn measure(path: &PathBuf, mib: u32) -> io::Result<()> {
    let mut file = File::options().read(true).write(true).create_new(true).open(path)?;
    let mut piece = vec![0_u8; MIB];
    let mut word = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..mib {
        for place in piece.as_chunks_mut::<8>().0 {
            // xorshift64: nothing that is alike, at no cost.
            word ^= word << 13;
            word ^= word >> 7;
            word ^= word << 17;
            *place = word.to_le_bytes();
        }
        file.write_all(&piece)?;
    }
    let mut out = io::stdout();
    let reading = least(mib, || {
        file.rewind()?;
        while file.read(&mut piece)? > 0 {}
        Ok(())
    })?;
    let mut kept = 0;
    let summing = least(mib, || {
        kept = Scan::of(&file, &mut |_| Ok(()))?.sums.to_bytes().len();
        Ok(())
    })?;
    for (what, [cpu, wall]) in [("read", reading), ("read and summed", summing)] {
        writeln!(out, "{what}: {cpu:.3} s of a processor, {wall:.3} s for 1 GiB")?;
    }
    writeln!(out, "the checksums of {mib} MiB take {kept} bytes")
}

/// Processor time and time that one GiB takes, the least of five times.
fn least(mib: u32, mut work: impl FnMut() -> io::Result<()>) -> io::Result<[f64; 2]> {
    let mut least = [f64::INFINITY; 2];
    for _ in 0..5 {
        let (began, cpu) = (Instant::now(), cpu_seconds()?);
        work()?;
        let took = [cpu_seconds()? - cpu, began.elapsed().as_secs_f64()];
        for (least, took) in least.iter_mut().zip(took) {
            *least = least.min(took * 1024.0 / f64::from(mib));
        }
    }
    Ok(least)
}

/// What this thread has run (proc(5), `schedstat`).
fn cpu_seconds() -> io::Result<f64> {
    let text = fs::read_to_string("/proc/thread-self/schedstat")?;
    let nanoseconds = text.split(' ').next().and_then(|first| first.parse::<f64>().ok());
    Ok(nanoseconds.ok_or(io::ErrorKind::InvalidData)? / 1e9)
}
