// SPDX-License-Identifier: GPL-2.0

//! Injections as text.

use crate::inject::{
    Injection,
    Object, //
};
use core::str::FromStr;
use kernel::prelude::*;

impl FromStr for Object {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self> {
        Ok(match word {
            "pd" => Object::Pd,
            "cq" => Object::Cq,
            "qp" => Object::Qp,
            "srq" => Object::Srq,
            "ah" => Object::Ah,
            "mr" => Object::Mr,
            _ => return Err(EINVAL),
        })
    }
}

impl FromStr for Injection {
    type Err = Error;

    fn from_str(line: &str) -> Result<Self> {
        let mut words = line.split_ascii_whitespace();
        let command = words.next().ok_or(EINVAL)?;
        let mut object = None;
        if command == "create" {
            object = Some(words.next().ok_or(EINVAL)?.parse::<Object>()?);
        }
        let mut number = |default: Option<u32>| match words.next() {
            None => default.ok_or(EINVAL),
            Some("all") => Ok(u32::MAX),
            Some(word) => word.parse().map_err(|_| EINVAL),
        };
        let injection = match (command, object) {
            ("status" | "fatal", _) => Injection::Status {
                status: number(None)?,
                count: number(Some(1))?,
                vendor_err: number(Some(0))?,
                fatal: command == "fatal",
            },
            ("opcode", _) => Injection::Opcode {
                opcode: number(None)?,
                count: number(Some(1))?,
            },
            ("hold", _) => Injection::Hold {
                count: number(Some(u32::MAX))?,
            },
            ("release" | "reverse", _) => Injection::Release {
                count: number(Some(u32::MAX))?,
                reversed: command == "reverse",
            },
            ("duplicate", _) => Injection::Duplicate {
                count: number(Some(1))?,
            },
            ("refuse", _) => Injection::Refuse {
                after: number(Some(0))?,
                errno: number(Some(ENOMEM.to_errno().unsigned_abs()))?,
            },
            ("mute", _) => Injection::Mute {
                after: number(Some(0))?,
                errno: number(Some(ENOMEM.to_errno().unsigned_abs()))?,
            },
            ("lapse", _) => Injection::Lapse {
                after: number(Some(0))?,
                errno: number(Some(ENOMEM.to_errno().unsigned_abs()))?,
            },
            ("stall" | "linger", _) => Injection::Stall {
                us: number(Some(1000))?,
                late: command == "linger",
            },
            ("modify", _) => Injection::Modify {
                count: number(Some(1))?,
                errno: number(Some(EIO.to_errno().unsigned_abs()))?,
            },
            ("dwell", _) => Injection::Dwell {
                us: number(Some(1000))?,
            },
            ("dereg", _) => Injection::Dereg {
                count: number(Some(1))?,
                errno: number(Some(EIO.to_errno().unsigned_abs()))?,
            },
            ("event", _) => Injection::Event {
                event: number(None)?,
            },
            ("connect", _) => Injection::Connect {
                peer: number(None)?,
            },
            ("fail", _) => Injection::Fail,
            ("arm", _) => Injection::Arm {
                us: number(Some(1000))?,
                count: number(Some(1))?,
            },
            ("peek", _) => Injection::Peek {
                on: number(Some(1))? != 0,
            },
            ("eager", _) => Injection::Eager {
                on: number(Some(1))? != 0,
            },
            ("create", Some(object)) => Injection::Create {
                object,
                after: number(Some(0))?,
                errno: number(Some(ENOMEM.to_errno().unsigned_abs()))?,
            },
            _ => return Err(EINVAL),
        };
        match words.next() {
            None => Ok(injection),
            Some(_) => Err(EINVAL),
        }
    }
}
