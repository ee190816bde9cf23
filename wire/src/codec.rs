//! The byte form of messages: little-endian integers, byte strings and lists with a 32-bit length.

/// A message that does not have the form it should have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

impl std::fmt::Display for Malformed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "malformed message: {}", self.0)
    }
}

impl std::error::Error for Malformed {}

/// Reads values from the front of a byte slice.
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Starts at the front of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        if self.rest.len() < len {
            return Err(Malformed("it ends too early"));
        }
        let (head, rest) = self.rest.split_at(len);
        self.rest = rest;
        Ok(head)
    }

    /// Fails if anything is left: a longer message is of another version.
    ///
    /// # Errors
    /// Something is left.
    pub fn finish(self) -> Result<(), Malformed> {
        if self.rest.is_empty() { Ok(()) } else { Err(Malformed("it is too long")) }
    }
}

/// A value with a byte form.
pub trait Wire: Sized {
    /// Appends the byte form.
    fn put(&self, out: &mut Vec<u8>);
    /// Reads the byte form back.
    ///
    /// # Errors
    /// The bytes end too early, or say what the value cannot be.
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed>;
}

/// A whole message, of one direction.
pub trait Stream: Wire {
    /// The byte form of the whole message.
    fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.put(&mut out);
        out
    }
    /// Reads the whole message; nothing may follow it.
    ///
    /// # Errors
    /// The bytes end too early, go on behind the message, or have a value that it cannot have.
    fn from_bytes(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let message = Self::get(&mut reader)?;
        reader.finish()?;
        Ok(message)
    }
}

macro_rules! integers {
    ($($t:ty),*) => {$(
        impl Wire for $t {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
            fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
                let bytes = from.take(size_of::<$t>())?;
                Ok(<$t>::from_le_bytes(bytes.try_into().expect("length was taken")))
            }
        }
    )*};
}
integers!(u8, u32, u64, i32, i64);

impl Wire for bool {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        match u8::get(from)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed("a boolean is neither 0 nor 1")),
        }
    }
}

impl<T: Wire + Copy + Default, const N: usize> Wire for [T; N] {
    fn put(&self, out: &mut Vec<u8>) {
        self.iter().for_each(|item| item.put(out));
    }
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        let mut items = [T::default(); N];
        for item in &mut items {
            *item = T::get(from)?;
        }
        Ok(items)
    }
}

impl Wire for String {
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u32).put(out);
        out.extend_from_slice(self.as_bytes());
    }
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        let len = u32::get(from)? as usize;
        let bytes = from.take(len)?.to_vec();
        String::from_utf8(bytes).map_err(|_| Malformed("a text is not UTF-8"))
    }
}

impl<T: Wire> Wire for Vec<T> {
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u32).put(out);
        for item in self {
            item.put(out);
        }
    }
    fn get(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        let len = u32::get(from)? as usize;
        // Grown as items arrive: a lying length must not allocate.
        let mut items = Vec::with_capacity(len.min(1024));
        for _ in 0..len {
            items.push(T::get(from)?);
        }
        Ok(items)
    }
}

/// Gives a struct the byte form of its fields in order.
#[macro_export]
macro_rules! wire_struct {
    ($(#[$meta:meta])* $vis:vis struct $name:ident { $($(#[$fmeta:meta])* $fvis:vis $field:ident: $ty:ty,)* }) => {
        $(#[$meta])*
        $vis struct $name { $($(#[$fmeta])* $fvis $field: $ty,)* }
        impl $crate::codec::Wire for $name {
            fn put(&self, out: &mut Vec<u8>) {
                $($crate::codec::Wire::put(&self.$field, out);)*
            }
            fn get(from: &mut $crate::codec::Reader<'_>) -> Result<Self, $crate::codec::Malformed> {
                Ok(Self { $($field: $crate::codec::Wire::get(from)?,)* })
            }
        }
    };
}

/// Gives an enum with named-field variants the byte form: a tag byte, then the fields in order.
#[macro_export]
macro_rules! wire_enum {
    ($(#[$meta:meta])* $vis:vis enum $name:ident {
        $($(#[$vmeta:meta])* $tag:literal => $variant:ident { $($(#[$fmeta:meta])* $field:ident: $ty:ty),* $(,)? },)*
    }) => {
        $(#[$meta])*
        $vis enum $name { $($(#[$vmeta])* $variant { $($(#[$fmeta])* $field: $ty),* },)* }
        impl $crate::codec::Wire for $name {
            fn put(&self, out: &mut Vec<u8>) {
                match self {
                    $($name::$variant { $($field),* } => {
                        out.push($tag);
                        $($crate::codec::Wire::put($field, out);)*
                    })*
                }
            }
            fn get(from: &mut $crate::codec::Reader<'_>) -> Result<Self, $crate::codec::Malformed> {
                match u8::get(from)? {
                    $($tag => Ok($name::$variant {
                        $($field: $crate::codec::Wire::get(from)?),*
                    }),)*
                    _ => Err($crate::codec::Malformed("its kind is unknown")),
                }
            }
        }
    };
}
