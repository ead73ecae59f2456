import java.io.*;
import java.net.*;
import java.net.http.*;
import java.nio.ByteBuffer;
import java.nio.channels.*;
import java.nio.file.*;
import java.security.MessageDigest;
import java.util.*;
import java.util.concurrent.*;

/** Talks to NetServer; arguments: its ports. Prints what came, which is the same whatever carries it. */
public class NetClient {
    public static void main(String[] args) throws Exception {
        int loop = Integer.parseInt(args[0]), threads = Integer.parseInt(args[1]), http = Integer.parseInt(args[2]);
        manyChannels(loop);
        files(loop);
        sockets(threads);
        closedBeneathReaders(threads);
        interrupted(loop);
        timeouts(threads);
        http(http);
        System.out.println("done");
        System.exit(0);
    }

    private static byte[] bytes(int seed, int length) {
        byte[] bytes = new byte[length];
        new Random(seed).nextBytes(bytes);
        return bytes;
    }

    private static void check(boolean right, String what) {
        if (!right) throw new AssertionError(what);
    }

    /** One selector for all of them, registered before they connect. */
    private static void manyChannels(int port) throws Exception {
        final int many = 100, length = 200_000;
        Selector selector = Selector.open();
        ByteBuffer[] out = new ByteBuffer[many], in = new ByteBuffer[many];
        for (int i = 0; i < many; i++) {
            out[i] = ByteBuffer.wrap(bytes(i, length));
            in[i] = ByteBuffer.allocate(length);
            SocketChannel channel = SocketChannel.open();
            channel.configureBlocking(false);
            channel.register(selector, SelectionKey.OP_CONNECT, i);
            channel.connect(new InetSocketAddress("127.0.0.1", port));
        }
        int left = many;
        while (left > 0) {
            selector.select();
            for (Iterator<SelectionKey> keys = selector.selectedKeys().iterator(); keys.hasNext(); ) {
                SelectionKey key = keys.next();
                keys.remove();
                SocketChannel channel = (SocketChannel) key.channel();
                int i = (int) key.attachment();
                if (key.isConnectable()) {
                    channel.finishConnect();
                    key.interestOps(SelectionKey.OP_READ | SelectionKey.OP_WRITE);
                    continue;
                }
                if (key.isWritable()) {
                    int limit = out[i].limit();
                    out[i].limit(Math.min(limit, out[i].position() + 7001));
                    channel.write(out[i]);
                    out[i].limit(limit);
                    if (!out[i].hasRemaining()) key.interestOps(SelectionKey.OP_READ);
                }
                if (key.isReadable()) {
                    check(channel.read(in[i]) >= 0, "channel " + i + " ended");
                    if (!in[i].hasRemaining()) {
                        check(Arrays.equals(in[i].array(), out[i].array()), "channel " + i);
                        channel.close();
                        left--;
                    }
                }
            }
        }
        System.out.println("channels " + many);
    }

    /** sendfile to a channel, and from a channel into a file. */
    private static void files(int port) throws Exception {
        Path from = Files.createTempFile("thallus", "from"), to = Files.createTempFile("thallus", "to");
        byte[] content = bytes(7, 8_000_000);
        Files.write(from, content);
        try (SocketChannel channel = SocketChannel.open(new InetSocketAddress("127.0.0.1", port));
                FileChannel source = FileChannel.open(from); FileChannel sink = FileChannel.open(to, StandardOpenOption.WRITE)) {
            for (int i = 0; i < 10; i++) {
                channel.write(ByteBuffer.wrap(new byte[] {1}));
                channel.read(ByteBuffer.allocate(1));
            }
            Thread writer = new Thread(() -> {
                try {
                    for (long sent = 0; sent < content.length; ) sent += source.transferTo(sent, content.length - sent, channel);
                } catch (IOException e) {
                    e.printStackTrace();
                }
            });
            writer.start();
            for (long got = 0; got < content.length; ) got += sink.transferFrom(channel, got, content.length - got);
            writer.join();
        }
        check(Arrays.equals(Files.readAllBytes(to), content), "the file");
        Files.delete(from);
        Files.delete(to);
        System.out.println("file " + content.length);
    }

    private static void sockets(int port) throws Exception {
        ExecutorService pool = Executors.newFixedThreadPool(8);
        List<Future<String>> all = new ArrayList<>();
        for (int t = 0; t < 8; t++) {
            final int seed = t;
            all.add(pool.submit(() -> {
                MessageDigest digest = MessageDigest.getInstance("SHA-256");
                try (Socket socket = new Socket("127.0.0.1", port)) {
                    DataInputStream in = new DataInputStream(new BufferedInputStream(socket.getInputStream()));
                    DataOutputStream out = new DataOutputStream(new BufferedOutputStream(socket.getOutputStream()));
                    for (int i = 0; i < 200; i++) {
                        byte[] message = bytes(seed * 1000 + i, i * 131);
                        out.writeInt(i % 40 == 39 ? -i : message.length);
                        if (i % 40 != 39) out.write(message);
                        out.flush();
                        byte[] answer = in.readNBytes(in.readInt());
                        if (i % 40 != 39) check(Arrays.equals(message, answer), "message " + i);
                        digest.update(answer);
                    }
                }
                return HexFormat.of().formatHex(digest.digest());
            }));
        }
        // In the order in which they were begun.
        for (Future<String> each : all) System.out.println("socket " + each.get());
        pool.shutdown();
    }

    /** close() in one thread while another is asleep in read(): it gets a SocketException. */
    private static void closedBeneathReaders(int port) throws Exception {
        for (int i = 0; i < 10; i++) {
            Socket socket = new Socket("127.0.0.1", port);
            DataOutputStream out = new DataOutputStream(socket.getOutputStream());
            DataInputStream in = new DataInputStream(socket.getInputStream());
            for (int j = 0; j < 20; j++) {
                out.writeInt(0);
                check(in.readInt() == 0, "an empty message");
            }
            CompletableFuture<String> end = new CompletableFuture<>();
            Thread reader = new Thread(() -> {
                try {
                    end.complete("read " + in.read());
                } catch (IOException e) {
                    end.complete(e.getClass().getName() + " " + e.getMessage());
                }
            });
            reader.start();
            Thread.sleep(20);
            socket.close();
            System.out.println("reader " + end.get(10, TimeUnit.SECONDS));
        }
    }

    /** A thread that is interrupted in a blocking read closes its channel. */
    private static void interrupted(int port) throws Exception {
        SocketChannel channel = SocketChannel.open(new InetSocketAddress("127.0.0.1", port));
        for (int i = 0; i < 20; i++) {
            channel.write(ByteBuffer.wrap(new byte[] {9}));
            check(channel.read(ByteBuffer.allocate(4)) == 1, "a byte");
        }
        CompletableFuture<String> end = new CompletableFuture<>();
        Thread reader = new Thread(() -> {
            try {
                end.complete("read " + channel.read(ByteBuffer.allocate(4)));
            } catch (IOException e) {
                end.complete(e.getClass().getName());
            }
        });
        reader.start();
        Thread.sleep(20);
        reader.interrupt();
        System.out.println("interrupted " + end.get(10, TimeUnit.SECONDS) + " " + channel.isOpen());
    }

    private static void timeouts(int port) throws Exception {
        try (Socket socket = new Socket()) {
            socket.connect(new InetSocketAddress("127.0.0.1", port), 5000);
            socket.setTcpNoDelay(true);
            // Timed reads that find something, however late.
            socket.setSoTimeout(60_000);
            DataOutputStream out = new DataOutputStream(socket.getOutputStream());
            DataInputStream in = new DataInputStream(socket.getInputStream());
            for (int i = 0; i < 20; i++) {
                out.writeInt(3);
                out.write(bytes(i, 3));
                check(in.readInt() == 3 && Arrays.equals(in.readNBytes(3), bytes(i, 3)), "three bytes");
            }
            socket.setSoTimeout(50);
            for (int i = 0; i < 3; i++) {
                try {
                    System.out.println("read " + in.read());
                } catch (SocketTimeoutException e) {
                    System.out.println("timeout " + in.available());
                }
            }
            socket.setSoTimeout(60_000);
            out.writeInt(1);
            out.write(5);
            System.out.println("then " + in.readInt() + " " + in.read());
            socket.shutdownOutput();
            System.out.println("end " + in.read());
        }
    }

    private static void http(int port) throws Exception {
        HttpClient client = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();
        List<CompletableFuture<HttpResponse<byte[]>>> all = new ArrayList<>();
        for (int i = 0; i < 60; i++) {
            HttpRequest request = HttpRequest.newBuilder(URI.create("http://127.0.0.1:" + port + "/"))
                .expectContinue(i % 5 == 0).POST(HttpRequest.BodyPublishers.ofByteArray(bytes(i, i * 5003))).build();
            all.add(client.sendAsync(request, HttpResponse.BodyHandlers.ofByteArray()));
        }
        for (int i = 0; i < 60; i++) check(Arrays.equals(all.get(i).get().body(), bytes(i, i * 5003)), "http " + i);
        System.out.println("http 60");
    }
}
