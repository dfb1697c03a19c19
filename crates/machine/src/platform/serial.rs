//! A 16550A for early output. Nothing is ever received.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use base::FileBound;
use bus::BusDevice;
use engine::Interrupt;
use vm_superio::{Serial, Trigger, serial::NoEvents};

struct Line(Arc<dyn Interrupt>);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.trigger();
        Ok(())
    }
}

/// Output that never stops a vCPU: what the receiver does not take is dropped.
struct Output {
    file: Option<File>,
    bound: Option<FileBound>,
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(file) = &mut self.file else {
            return Ok(bytes.len());
        };
        let written = file.write(bytes).and_then(|count| match &mut self.bound {
            Some(bound) => bound.wrote(&*file, count as u64),
            None => Ok(()),
        });
        if let Err(error) = written
            && !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
        {
            log::warn!("serial output goes nowhere from here on: {error}");
            self.file = None;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The serial port.
pub struct SerialPort(Mutex<Serial<Line, NoEvents, Output>>);

impl SerialPort {
    /// Makes `output` non-blocking: a vCPU that waits for a reader can neither be kicked for certain nor go on. `keep`
    /// is how many of its last bytes a file keeps.
    ///
    /// # Errors
    /// The host refuses that.
    pub fn new(line: Arc<dyn Interrupt>, output: Option<OwnedFd>, keep: Option<u64>) -> io::Result<Arc<Self>> {
        if let Some(output) = &output {
            rustix::io::ioctl_fionbio(output, true)?;
        }
        let output = Output {
            file: output.map(File::from),
            bound: keep.map(FileBound::new),
        };
        Ok(Arc::new(Self(Mutex::new(Serial::new(Line(line), output)))))
    }
}

impl BusDevice for SerialPort {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if let ([value], Ok(offset)) = (data, u8::try_from(offset)) {
            *value = self.0.lock().unwrap_or_else(PoisonError::into_inner).read(offset);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let ([value], Ok(offset)) = (data, u8::try_from(offset)) {
            let written = self
                .0
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .write(offset, *value);
            if let Err(error) = written {
                // Only loopback mode can fill the receive buffer; real hardware overruns silently, too.
                log::debug!("serial port: {error:?}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::MsiMessage;
    use std::io::Read;
    use std::sync::mpsc;
    use std::time::Duration;

    struct Nowhere;

    impl Interrupt for Nowhere {
        fn trigger(&self) {}
        fn route(&self, _: Option<MsiMessage>) {}
        fn is_pending(&self) -> bool {
            false
        }
    }

    #[test]
    fn a_reader_that_does_not_read_stops_nobody() {
        let (mut reader, writer) = io::pipe().unwrap();
        let port = SerialPort::new(Arc::new(Nowhere), Some(writer.into()), None).unwrap();
        let (done, wait) = mpsc::channel();
        let vcpu = Arc::clone(&port);
        std::thread::spawn(move || {
            // A pipe holds 64 KiB unless told otherwise.
            for _ in 0..(128 << 10) {
                vcpu.write(0, b"x");
            }
            done.send(()).unwrap();
        });
        wait.recv_timeout(Duration::from_secs(30)).unwrap();
        // Who reads again gets what is written from then on.
        let mut bytes = [0; 64 << 10];
        reader.read_exact(&mut bytes).unwrap();
        port.write(0, b"y");
        reader.read_exact(&mut bytes[..1]).unwrap();
        assert_eq!(bytes[0], b'y');
    }
}
