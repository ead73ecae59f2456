<?php
// What PHP's extensions ask of MariaDB: they are loaded with RTLD_DEEPBIND, and wait for connections by themselves.
mysqli_report(MYSQLI_REPORT_ERROR | MYSQLI_REPORT_STRICT);
$port = (int) $argv[1];

function connection(int $port): mysqli
{
    return new mysqli('127.0.0.1', 'root', '', 'mysql', $port);
}

// Long enough to leave TCP.
$links = array_map(fn () => connection($port), range(0, 3));
foreach ($links as $number => $link) {
    for ($i = 0; $i < 30; $i++) {
        $answer = $link->query("select $i * $number")->fetch_row()[0];
        assert($answer == $i * $number);
    }
}

// All at once; each is done when poll says so.
for ($round = 0; $round < 20; $round++) {
    $waiting = [];
    foreach ($links as $number => $link) {
        $rows = 1 + 500 * $number;
        $link->query("select seq, md5(seq + $round) from seq_1_to_$rows", MYSQLI_ASYNC);
        $waiting[$number] = $link;
    }
    $seen = [];
    while ($waiting) {
        $read = $error = $reject = $waiting;
        mysqli::poll($read, $error, $reject, 3600);
        foreach ($read as $link) {
            $number = array_search($link, $waiting, true);
            $seen[$number] = md5(json_encode($link->reap_async_query()->fetch_all()));
            unset($waiting[$number]);
        }
    }
    ksort($seen);
    echo $round, ' ', implode(' ', $seen), "\n";
}
// Nothing is there, until it is interrupted.
$links[0]->query('select sleep(10)', MYSQLI_ASYNC);
$read = $error = $reject = [$links[0]];
echo 'idle: ', mysqli::poll($read, $error, $reject, 0, 20000), "\n";
$links[1]->query('kill query ' . $links[0]->thread_id);
$read = $error = $reject = [$links[0]];
echo 'killed: ', mysqli::poll($read, $error, $reject, 3600), "\n";
try {
    $links[0]->reap_async_query();
} catch (mysqli_sql_exception $error) {
    echo $error->getMessage(), "\n";
}

// A large answer, a large question, prepared statements, an error.
$link = $links[2];
echo md5($link->query("select repeat('large', 1000000)")->fetch_row()[0]), "\n";
$text = str_repeat('question', 500000);
$statement = $link->prepare('select md5(?), length(?)');
$statement->execute([$text, $text]);
echo implode(' ', $statement->get_result()->fetch_row()), "\n";
try {
    $link->query('select nothing');
} catch (mysqli_sql_exception $error) {
    echo $error->getMessage(), "\n";
}
$pdo = new PDO("mysql:host=127.0.0.1;port=$port;dbname=mysql", 'root', '', [PDO::MYSQL_ATTR_USE_BUFFERED_QUERY => false]);
for ($i = 0; $i < 20; $i++) {
    echo md5(json_encode($pdo->query("select seq, seq * $i from seq_1_to_2000")->fetchAll())), "\n";
}
foreach ($links as $link) {
    $link->close();
}
