//! A 16550A for early output. Nothing is ever received.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

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
struct Output(Option<File>);

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(file) = &mut self.0
            && let Err(error) = file.write(bytes)
            && error.kind() != io::ErrorKind::WouldBlock
        {
            log::warn!("serial output goes nowhere from here on: {error}");
            self.0 = None;
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
    /// `output` should be non-blocking if it is anything but a file.
    pub fn new(line: Arc<dyn Interrupt>, output: Option<OwnedFd>) -> Arc<Self> {
        let output = Output(output.map(File::from));
        Arc::new(Self(Mutex::new(Serial::new(Line(line), output))))
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
