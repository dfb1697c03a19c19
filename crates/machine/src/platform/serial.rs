//! A 16550A for early output. Nothing is ever received.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use base::FileBound;
use bus::BusDevice;
use engine::Interrupt;
use serde::{Deserialize, Serialize};
use vm_superio::serial::{NoEvents, SerialState};
use vm_superio::{Serial, Trigger};

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

/// The registers as they are saved.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SerialRegisters {
    /// Divisor latch, low and high byte.
    pub divisor: [u8; 2],
    /// Interrupt enable.
    pub interrupt_enable: u8,
    /// Interrupt identification.
    pub interrupt_identification: u8,
    /// Line control.
    pub line_control: u8,
    /// Line status.
    pub line_status: u8,
    /// Modem control.
    pub modem_control: u8,
    /// Modem status.
    pub modem_status: u8,
    /// Scratch.
    pub scratch: u8,
    /// Received and not read: what the guest sent itself in loopback mode.
    pub received: Vec<u8>,
}

/// The serial port.
pub struct SerialPort(Mutex<Serial<Line, NoEvents, Output>>);

impl SerialPort {
    /// Makes `output` non-blocking: a vCPU that waits for a reader can neither be kicked for certain nor go on. `keep`
    /// is how many of its last bytes a file keeps; `saved` what [`SerialPort::save`] gave, if it goes on.
    ///
    /// # Errors
    /// The host refuses that, or no serial port can be in the saved state.
    pub fn new(
        line: Arc<dyn Interrupt>,
        output: Option<OwnedFd>,
        keep: Option<u64>,
        saved: Option<&SerialRegisters>,
    ) -> io::Result<Arc<Self>> {
        if let Some(output) = &output {
            rustix::io::ioctl_fionbio(output, true)?;
        }
        let output = Output {
            file: output.map(File::from),
            bound: keep.map(FileBound::new),
        };
        let serial = match saved {
            None => Serial::new(Line(line), output),
            Some(saved) => Serial::from_state(&to_state(saved), Line(line), NoEvents, output)
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, format!("{error:?}")))?,
        };
        Ok(Arc::new(Self(Mutex::new(serial))))
    }

    /// The registers.
    pub fn save(&self) -> SerialRegisters {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner).state();
        SerialRegisters {
            divisor: [state.baud_divisor_low, state.baud_divisor_high],
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            received: state.in_buffer,
        }
    }
}

fn to_state(saved: &SerialRegisters) -> SerialState {
    let [baud_divisor_low, baud_divisor_high] = saved.divisor;
    SerialState {
        baud_divisor_low,
        baud_divisor_high,
        interrupt_enable: saved.interrupt_enable,
        interrupt_identification: saved.interrupt_identification,
        line_control: saved.line_control,
        line_status: saved.line_status,
        modem_control: saved.modem_control,
        modem_status: saved.modem_status,
        scratch: saved.scratch,
        in_buffer: saved.received.clone(),
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
    fn registers_survive_being_saved() {
        let port = SerialPort::new(Arc::new(Nowhere), None, None, None).unwrap();
        // Loopback, so that something is received; interrupts on; a scratch value.
        port.write(4, &[0x10]);
        port.write(0, b"x");
        port.write(1, &[3]);
        port.write(7, &[0x5a]);
        let saved = port.save();
        assert_eq!((saved.received.as_slice(), saved.scratch), (&b"x"[..], 0x5a));
        let copy = SerialPort::new(Arc::new(Nowhere), None, None, Some(&saved)).unwrap();
        assert_eq!(copy.save(), saved);
        let mut value = [0];
        copy.read(0, &mut value);
        assert_eq!(value, *b"x");
        let impossible = SerialRegisters {
            received: vec![0; 1000],
            ..saved
        };
        assert!(SerialPort::new(Arc::new(Nowhere), None, None, Some(&impossible)).is_err());
    }

    #[test]
    fn a_reader_that_does_not_read_stops_nobody() {
        let (mut reader, writer) = io::pipe().unwrap();
        let port = SerialPort::new(Arc::new(Nowhere), Some(writer.into()), None, None).unwrap();
        let (done, wait) = mpsc::channel();
        let vcpu = Arc::clone(&port);
        std::thread::spawn(move || {
            // A pipe holds 64 KiB unless told otherwise.
            for _ in 0..(128 << 10) {
                vcpu.write(0, b"x");
            }
            done.send(()).unwrap();
        });
        wait.recv_timeout(Duration::from_secs(90)).unwrap();
        // Who reads again gets what is written from then on.
        let mut bytes = [0; 64 << 10];
        reader.read_exact(&mut bytes).unwrap();
        port.write(0, b"y");
        reader.read_exact(&mut bytes[..1]).unwrap();
        assert_eq!(bytes[0], b'y');
    }
}
